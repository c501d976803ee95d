"""Bit-exact simulation of narrow floating-point formats that share a scale per block.

`mxsim.formats` holds the element formats and `mxsim.blocks` the blocks built from them. Importing this package loads
neither, so it costs nothing; import the part that is needed.
"""

__version__ = "0.1.0"
