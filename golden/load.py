"""Reads the golden vectors; needs NumPy only. `python golden/load.py` checks the files and lists the cases.

for case in load("golden"):
    x = case["inputs"]["x"]            # bits, as unsigned integers, in the array's shape
    right = case["outputs"]["codes"]
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

# element -> NumPy dtype of its bits; floats are read as bits, so that NaN and -0 compare as they are
DTYPES = {"e2m1x2": "u1", "e4m3": "u1", "e8m0": "u1", "f16": "<u2", "bf16": "<u2", "f32": "<u4", "i64": "<i8"}


def load(folder):
    """The cases: dictionaries of op, name, options, and inputs and outputs by name, each an array of bits.

    Raises ValueError if a file is not the one that the manifest describes.
    """
    folder = Path(folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if manifest["format_version"] != 1:
        raise ValueError(f"{folder}: format_version is {manifest['format_version']}, this reader knows 1")
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    if hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() != manifest["sha256"]:
        raise ValueError(f"{folder}: manifest.json does not have the hash that it states")
    data = {name: (folder / name).read_bytes() for name in manifest["files"]}
    for name, file in manifest["files"].items():
        if hashlib.sha256(data[name]).hexdigest() != file["sha256"]:
            raise ValueError(f"{folder / name}: does not have the hash that the manifest states")

    def array(v):
        dtype, count = np.dtype(DTYPES[v["dtype"]]), int(np.prod(v["shape"]))
        return np.frombuffer(data[v["file"]], dtype, count, v["offset"]).reshape(v["shape"])

    return [
        {**case, **{kind: {v["name"]: array(v) for v in case[kind]} for kind in ("inputs", "outputs")}}
        for case in manifest["cases"]
    ]


if __name__ == "__main__":
    for case in load(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent):
        shapes = {name: list(a.shape) for name, a in {**case["inputs"], **case["outputs"]}.items()}
        print(case["op"], case["name"], case["options"], shapes)
