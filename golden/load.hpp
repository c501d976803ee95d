// Reads the golden vectors through manifest.txt; C++17, standard library only.
//
//   for (const golden::Case& c : golden::load("golden"))
//     if (c.op == "bf16_to_fp4_row")
//       my_kernel(c.inputs.at("x").as<uint16_t>(), c.option("scale_rule")), compare with c.outputs.at("codes").bytes;
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace golden {

struct Array {
  std::string dtype;  // e2m1x2, e4m3, e8m0: 1 byte; f16, bf16: 2; f32: 4; i64: 8; little-endian
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;

  // Throws unless T has the size of an element.
  template <typename T>
  std::vector<T> as() const {
    size_t count = 1;
    for (const int64_t size : shape) count *= static_cast<size_t>(size);
    if (count * sizeof(T) != bytes.size()) throw std::runtime_error("as<T>: T has not the size of " + dtype);
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
};

struct Case {
  std::string op, name;
  std::map<std::string, std::vector<std::string>> options;
  std::map<std::string, Array> inputs, outputs;

  std::string option(const std::string& key, const std::string& otherwise = "") const {
    const auto found = options.find(key);
    return found == options.end() || found->second.empty() ? otherwise : found->second[0];
  }
};

inline std::vector<Case> load(const std::string& folder) {
  std::ifstream manifest(folder + "/manifest.txt");
  std::string line, word, hash;
  int version = 0;
  if (!(manifest >> word >> version >> hash) || word != "mxsim-golden" || version != 1)
    throw std::runtime_error(folder + "/manifest.txt: missing, or not of version 1");
  const std::map<std::string, int> sizes = {{"e2m1x2", 1}, {"e4m3", 1}, {"e8m0", 1}, {"f16", 2},
                                            {"bf16", 2},   {"f32", 4},  {"i64", 8}};
  std::vector<Case> cases;
  while (std::getline(manifest, line)) {
    std::istringstream in(line);
    if (!(in >> word)) continue;
    if (word == "case") {
      cases.emplace_back();
      in >> cases.back().op >> cases.back().name;
    } else if (word == "option" && !cases.empty()) {
      std::string key, item;
      size_t count = 0;
      in >> key >> count;
      std::vector<std::string>& items = cases.back().options[key];
      while (items.size() < count && in >> item) items.push_back(item);
    } else if ((word == "input" || word == "output") && !cases.empty()) {
      std::string name, file;
      int64_t offset = 0, count = 1;
      size_t ndim = 0;
      Array array;
      in >> name >> array.dtype >> file >> offset >> ndim;
      for (int64_t size; array.shape.size() < ndim && in >> size && size >= 0; count *= size)
        array.shape.push_back(size);
      if (!in || array.shape.size() != ndim || sizes.count(array.dtype) == 0)
        throw std::runtime_error(folder + "/manifest.txt: no array in '" + line + "'");
      array.bytes.resize(static_cast<size_t>(count) * sizes.at(array.dtype));
      std::ifstream data(folder + "/" + file, std::ios::binary);
      data.seekg(offset);
      if (!data.read(reinterpret_cast<char*>(array.bytes.data()), static_cast<std::streamsize>(array.bytes.size())))
        throw std::runtime_error(folder + "/" + file + ": too short");
      (word == "input" ? cases.back().inputs : cases.back().outputs)[name] = array;
    } else {
      throw std::runtime_error(folder + "/manifest.txt: not understood: '" + line + "'");
    }
  }
  return cases;
}

}  // namespace golden
