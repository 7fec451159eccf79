#include "symbols.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <sstream>

namespace cuda_on_host {
namespace {

std::string output_of(const std::string& command) {
  std::string text;
  FILE* const pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return text;
  char part[4096];
  while (const size_t count = std::fread(part, 1, sizeof(part), pipe)) text.append(part, count);
  pclose(pipe);
  return text;
}

Dl_info library_of(const void* code) {
  Dl_info info{};
  dladdr(code, &info);
  return info;
}

// Function and file:line, one per line.
std::string described(const void* code) {
  const Dl_info info = library_of(code);
  if (info.dli_fname == nullptr) return "";
  char offset[32];
  std::snprintf(offset, sizeof(offset), "0x%zx",
                static_cast<size_t>(static_cast<const char*>(code) -
                                    static_cast<const char*>(info.dli_fbase)));
  return output_of("addr2line -sfCe '" + std::string(info.dli_fname) + "' " + offset);
}

}  // namespace

std::string function_name(const void* code) {
  const std::string text = described(code);
  const std::string name = text.substr(0, text.find('\n'));
  return name.empty() || name == "??" ? "a kernel" : name;
}

std::string line_name(const void* code) {
  // The return address of a call; the call itself is before it.
  const std::string text = described(static_cast<const char*>(code) - 1);
  const size_t first = text.find('\n');
  if (first == std::string::npos) return "an unknown line";
  const std::string line = text.substr(first + 1);
  return line.substr(0, line.find_first_of(" \n"));
}

const std::vector<Variable>& variables() {
  static std::vector<Variable> found;
  if (!found.empty()) return found;
  const Dl_info info = library_of(reinterpret_cast<const void*>(&library_of));
  std::istringstream symbols(output_of("readelf -sWC '" + std::string(info.dli_fname) + "'"));
  for (std::string line; std::getline(symbols, line);) {
    std::istringstream fields(line);
    std::string number, value, size, type, binding, visibility, section, name;
    fields >> number >> value >> size >> type >> binding >> visibility >> section;
    if (type != "TLS") continue;
    std::getline(fields, name);
    const size_t scope = name.rfind("::");
    found.push_back({scope == std::string::npos ? name : name.substr(scope + 2),
                     std::stoull(value, nullptr, 16), std::stoull(size, nullptr, 0),
                     name.find("guard variable for ") != std::string::npos});
  }
  return found;
}

std::string variable_name(size_t offset) {
  for (const Variable& v : variables()) {
    if (offset >= v.offset && offset < v.offset + v.size) {
      return v.name + "+" + std::to_string(offset - v.offset);
    }
  }
  return "shared memory+" + std::to_string(offset);
}

}  // namespace cuda_on_host
