// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "ranktable.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <charconv>
#include <fstream>
#include <iterator>
#include <map>

#include "types.h"

namespace emu::hccl {
namespace {

// JSON value; numbers and words are kept as text.
struct Value {
  std::string text;
  std::vector<Value> items;
  std::map<std::string, Value> members;

  std::string at(const std::string& key) const {
    const auto found = members.find(key);
    return found == members.end() ? "" : found->second.text;
  }
  const std::vector<Value>& list(const std::string& key) const {
    static const std::vector<Value> none;
    const auto found = members.find(key);
    return found == members.end() ? none : found->second.items;
  }
};

class Reader {
 public:
  explicit Reader(std::string text) : text_(std::move(text)) {}
  Value all() {
    Value value = read(0);
    if (next()) fail_at_position();
    return value;
  }

 private:
  char next() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
    return at_ < text_.size() ? text_[at_] : 0;
  }
  void expect(char expected) {
    if (next() != expected) fail_at_position();
    ++at_;
  }
  [[noreturn]] void fail_at_position() {
    refuse_call(kParameter, "the rank table is not JSON at character ", at_);
  }
  std::string string() {
    expect('"');
    std::string out;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] != '\\') {
        out += text_[at_++];
        continue;
      }
      static const std::string names = "\"\\/bfnrtu", values = "\"\\/\b\f\n\r\t";
      const auto which = ++at_ < text_.size() ? names.find(text_[at_]) : std::string::npos;
      if (which == std::string::npos) fail_at_position();
      ++at_;
      which < values.size() ? out += values[which] : out += utf8(code_unit());
    }
    expect('"');
    return out;
  }
  // Four hexadecimal digits of \uXXXX.
  uint32_t code_unit() {
    uint32_t code = 0;
    const auto [end, error] = std::from_chars(
        text_.data() + at_, text_.data() + std::min(at_ + 4, text_.size()), code, 16);
    if (error != std::errc() || end != text_.data() + at_ + 4) fail_at_position();
    at_ += 4;
    if (code >> 10 != 0x36) return code;  // no first half of a pair
    if (text_.compare(at_, 2, "\\u") != 0) fail_at_position();
    at_ += 2;
    const auto second = code_unit();
    if (second >> 10 != 0x37) fail_at_position();
    return 0x10000 + ((code & 0x3ff) << 10 | (second & 0x3ff));
  }
  static std::string utf8(uint32_t code) {
    const auto tail = [&](int shift) { return static_cast<char>(0x80 | (code >> shift & 0x3f)); };
    if (code < 0x80) return {static_cast<char>(code)};
    if (code < 0x800) return {static_cast<char>(0xc0 | code >> 6), tail(0)};
    if (code < 0x10000) return {static_cast<char>(0xe0 | code >> 12), tail(6), tail(0)};
    return {static_cast<char>(0xf0 | code >> 18), tail(12), tail(6), tail(0)};
  }
  Value read(int depth) {
    if (depth > 32) fail_at_position();
    Value value;
    switch (next()) {
      case '{':
        for (expect('{'); next() != '}';) {
          const auto key = string();
          expect(':');
          value.members[key] = read(depth + 1);
          if (next() != '}') expect(',');
        }
        expect('}');
        break;
      case '[':
        for (expect('['); next() != ']';) {
          value.items.push_back(read(depth + 1));
          if (next() != ']') expect(',');
        }
        expect(']');
        break;
      case '"': value.text = string(); break;
      default:
        while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) ||
                                         std::string("+-.").find(text_[at_]) != std::string::npos))
          value.text += text_[at_++];
        if (value.text.empty()) fail_at_position();
    }
    return value;
  }

  std::string text_;
  size_t at_ = 0;
};

// IPv4 address of a server, "" if there is none. A name that does not resolve is this machine if it
// is the only server.
std::string resolved(const std::string& host, bool only) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_INET;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0 || !found)
    return only ? "127.0.0.1" : "";
  char address[INET_ADDRSTRLEN];
  inet_ntop(
      AF_INET, &reinterpret_cast<sockaddr_in*>(found->ai_addr)->sin_addr, address, sizeof address);
  freeaddrinfo(found);
  return address;
}

}  // namespace

RankTable read_rank_table(const char* path) {
  std::ifstream file(path);
  if (!file) refuse_call(kOpenFile, "the rank table does not open: ", path);
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  const auto root = Reader(content).all();
  if (const auto status = root.at("status"); status != "completed")
    refuse_call(kUnavailable, path, ": status is ", status.empty() ? "missing" : status,
        "; it must be completed");
  std::map<int, std::string> found;
  const auto& servers = root.list("server_list");
  for (const auto& server : servers) {
    // server_id is an address, or a name if host_ip has the address.
    const auto host = server.at("host_ip").empty() ? server.at("server_id") : server.at("host_ip");
    const auto address = resolved(host, servers.size() == 1);
    if (address.empty())
      refuse_call(kParameter, path, ": server_id '", host,
          "' is no IPv4 address and does not resolve; give the server's host_ip");
    for (const auto& device : server.list("device")) {
      const auto rank = device.at("rank_id");
      if (rank.empty() || rank.find_first_not_of("0123456789") != std::string::npos ||
          rank.size() > 6)
        refuse_call(kParameter, path, ": rank_id is '", rank, "'; it is a number");
      if (!found.emplace(std::stoi(rank), address).second)
        refuse_call(kParameter, path, ": rank_id ", rank, " occurs twice");
    }
  }
  if (found.empty()) refuse_call(kParameter, path, ": server_list has no device with a rank_id");
  if (found.rbegin()->first + 1 != static_cast<int>(found.size()))
    refuse_call(kParameter, path, ": rank_id goes to ", found.rbegin()->first, ", but there are ",
        found.size());
  const Secret of_readers(Secret("rank table").sign(content));
  RankTable table{{}, of_readers.sign("identity").substr(0, 16), of_readers};
  for (const auto& [rank, address] : found) table.servers.push_back(address);
  return table;
}

}  // namespace emu::hccl
