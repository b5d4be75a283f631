// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Connection set-up of a communicator's ranks.
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <c10/util/hash.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <map>

#include "core/device.h"
#include "transport.h"

namespace emu::hccl {
namespace {

// How a rank introduces itself to a lower one. The signature is of the lower rank's address, which
// occurs once, and of the numbers: who reads it cannot use it for another connection.
struct Handshake {
  uint32_t rank, ranks;
  char signature[Secret::kSignature];
};

Handshake introduction(
    const Secret& secret, const std::string& address, uint32_t rank, uint32_t ranks) {
  Handshake made{rank, ranks, {}};
  secret.sign(text("link to ", address, " from ", rank, " of ", ranks))
      .copy(made.signature, sizeof made.signature);
  return made;
}

// A connection whose handshake has not arrived in full. Other programs may connect to the port.
struct Arrival {
  File link;
  Clock::time_point until;
  Handshake from{};
  size_t received = 0;

  // False if the connection ended, or took too long.
  bool read(bool readable) {
    if (!readable) return Clock::now() < until;
    const auto bytes = recv(link.get(), reinterpret_cast<char*>(&from) + received,
        sizeof from - received, MSG_DONTWAIT);
    if (bytes > 0) received += static_cast<size_t>(bytes);
    return bytes > 0 || (bytes < 0 && (errno == EAGAIN || errno == EINTR));
  }
  bool complete() const { return received == sizeof from; }
};
constexpr size_t kArrivals = 256;  // at once; one more replaces the oldest
constexpr std::chrono::seconds kHandshake{30};

File make_socket(int family) {
  File made(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  check(made.get() >= 0, kOpFailed, "a socket cannot be made: ", std::strerror(errno));
  return made;
}

// Abstract socket name: starts with a zero byte, no file.
std::pair<sockaddr_un, socklen_t> local_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

sockaddr_in tcp_address(const std::string& ip, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  check(inet_pton(AF_INET, ip.c_str(), &address.sin_addr) == 1, kInvalidParam,
      "not an IPv4 address: ", ip, " (HCCL_IF_IP)");
  return address;
}

// Waits for a file descriptor; false on timeout.
bool ready(int fd, short events, Clock::time_point deadline) {
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd file{fd, events, 0};
    const int found = poll(&file, 1, static_cast<int>(std::max<int64_t>(left, 0)));
    if (found > 0) return true;
    if (found == 0) return false;
  }
}

void finish(const File& link, bool tcp) {
  const int on = 1;
  if (tcp) {
    setsockopt(link.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(link.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  }
  const int bytes = 4 << 20;  // fewer wake-ups for large messages; the kernel may grant less
  setsockopt(link.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

bool use_tcp() {
  const char* choice = std::getenv("ASCEND_EMULATOR_HCCL_TRANSPORT");
  if (!choice || !*choice) return false;
  check_emulated(std::string(choice) == "tcp", kInvalidParam, "ASCEND_EMULATOR_HCCL_TRANSPORT is ",
      choice, "; allowed: tcp, or unset for Unix sockets within a machine");
  return true;
}

// What a rank publishes.
struct Address {
  std::string machine, npu, local, transport;
};
Address parse(const std::string& text) {
  std::stringstream parts(text);
  Address address;
  parts >> address.machine >> address.npu >> address.local >> address.transport;
  return address;
}

bool needs_tcp(const Address& peer) {
  return use_tcp() || peer.transport == "tcp" || peer.machine != machine();
}

// Other users of the machine can connect to an abstract Unix socket.
bool same_user(const File& link) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(link.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == geteuid();
}

void set_nonblocking(const File& file) {
  fcntl(file.get(), F_SETFL, fcntl(file.get(), F_GETFL) | O_NONBLOCK);
}

File connect_to(int peer, const Address& at, const std::function<std::string(int)>& tcp_address_of,
    Clock::time_point deadline) {
  const bool tcp = needs_tcp(at);
  File link = make_socket(tcp ? AF_INET : AF_UNIX);
  set_nonblocking(link);
  std::string place = text("Unix socket ", at.local);
  int done;
  if (tcp) {
    place = tcp_address_of(peer);
    std::stringstream parts(place);
    std::string ip;
    int port = 0;
    parts >> ip >> port;
    const auto address = tcp_address(ip, port);
    done = ::connect(link.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  } else {
    const auto [address, length] = local_address(at.local);
    done = ::connect(link.get(), reinterpret_cast<const sockaddr*>(&address), length);
  }
  int error = done == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    socklen_t length = sizeof error;
    if (!ready(link.get(), POLLOUT, deadline)) error = ETIMEDOUT;
    else getsockopt(link.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error)
    refuse_call(kConnect, "no connection to rank ", peer, " at ", place, ": ", std::strerror(error),
        "; is it reachable from this machine (HCCL_IF_IP, HCCL_SOCKET_IFNAME)?");
  if (!tcp && !same_user(link))
    refuse_call(kConnect, "rank ", peer, " is a process of another user");
  finish(link, tcp);
  return link;
}

}  // namespace

std::string machine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot, space(64, '\0');
  std::getline(file, boot);
  const auto length = readlink("/proc/self/ns/net", space.data(), space.size());
  space.resize(std::max<ssize_t>(length, 0));
  return boot + "/" + space;
}

std::string root_ip() {
  const auto given = [](const char* variable) {
    return std::getenv(variable) && *std::getenv(variable);
  };
  return given("HCCL_IF_IP") || given("HCCL_SOCKET_IFNAME") ? host_ip() : "127.0.0.1";
}

std::pair<File, int> bound(const std::string& ip, int port) {
  File made = make_socket(AF_INET);
  auto address = tcp_address(ip, port);
  socklen_t length = sizeof address;
  const int on = 1;
  check(setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
            bind(made.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
            listen(made.get(), 1024) == 0 &&
            getsockname(made.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0,
      kOpFailed, "cannot listen on ", ip, port ? text(" port ", port) : "", ": ",
      std::strerror(errno));
  return {std::move(made), ntohs(address.sin_port)};
}

std::string host_ip() {
  if (const char* ip = std::getenv("HCCL_IF_IP"); ip && *ip) return ip;
  // HCCL_SOCKET_IFNAME: "eth,enp" prefixes, "=eth0" names, "^…" all but these (Huawei's
  // "Environment Variables").
  std::string rule = std::getenv("HCCL_SOCKET_IFNAME") ? std::getenv("HCCL_SOCKET_IFNAME") : "";
  bool without = false, exact = false;
  if (rule.starts_with('^')) without = true, rule.erase(0, 1);
  if (rule.starts_with('=')) exact = true, rule.erase(0, 1);
  const auto matches = [&](const std::string& name) {
    std::stringstream list(rule);
    for (std::string each; std::getline(list, each, ',');) {
      if (exact ? name == each : name.starts_with(each)) return true;
    }
    return false;
  };
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "127.0.0.1";
  std::vector<std::tuple<int, std::string, std::string>>
      found;  // order: others, docker, loopback; then by name
  for (auto* one = all; one; one = one->ifa_next) {
    if (!one->ifa_addr || one->ifa_addr->sa_family != AF_INET || !(one->ifa_flags & IFF_UP))
      continue;
    const std::string name = one->ifa_name;
    if (!rule.empty() && matches(name) == without) continue;
    char ip[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(one->ifa_addr)->sin_addr, ip, sizeof ip);
    found.emplace_back(one->ifa_flags & IFF_LOOPBACK ? 2
                       : name.starts_with("docker")  ? 1
                                                     : 0,
        name, ip);
  }
  freeifaddrs(all);
  check(!found.empty() || rule.empty(), kInvalidParam,
      "no network interface fits HCCL_SOCKET_IFNAME=",
      std::getenv("HCCL_SOCKET_IFNAME") ? std::getenv("HCCL_SOCKET_IFNAME") : "");
  return found.empty() ? "127.0.0.1" : std::get<2>(*std::min_element(found.begin(), found.end()));
}

Secret Secret::random() {
  uint64_t words[2];
  check(getrandom(words, sizeof words, 0) == sizeof words, kOpFailed,
      "getrandom: ", std::strerror(errno));
  return Secret(text(hex(words[0]), "-", hex(words[1])));
}

namespace {
constexpr size_t kSha1Block = 64;  // bytes, of SHA-1
}  // namespace

Secret::Secret(const std::string& key)
    : key_(key.size() > kSha1Block ? c10::sha1(key).str() : key) {}

std::string Secret::sign(const std::string& message) const {
  std::string inner(kSha1Block, '\x36'), outer(kSha1Block, '\x5c');
  for (size_t i = 0; i < key_.size(); ++i) inner[i] ^= key_[i], outer[i] ^= key_[i];
  return c10::sha1(outer + c10::sha1(inner + message).str()).str();
}

Rendezvous::Rendezvous(int npu) : local_(make_socket(AF_UNIX)) {
  struct Names {
    std::atomic<int> number{0};
  };
  const auto name = text("ascend-emulator-", getpid(), "-", process.part<Names>().number++, "-",
      Secret::random().key());
  auto [local, local_length] = local_address(name);
  check(bind(local_.get(), reinterpret_cast<sockaddr*>(&local), local_length) == 0 &&
            listen(local_.get(), 128) == 0,
      kOpFailed, "cannot listen on a Unix socket: ", std::strerror(errno));
  address_ = text(machine(), " ", physical_id(npu), " ", name, " ", use_tcp() ? "tcp" : "any");
}

// A rank is an NPU of the communicator: "每个通信对象(例如一个NPU就是一个通信对象)…称为一个rank"
// (Huawei's HCCL user guide, 通信域管理); "the entered device list cannot contain duplicate device
// IDs" (HcclCommInitAll).
void Rendezvous::check_npus(
    const std::string& communicator, const std::vector<std::string>& addresses) {
  std::map<std::pair<std::string, std::string>, size_t> ranks;
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    const auto at = parse(addresses[rank]);
    const auto [other, is_new] = ranks.emplace(std::pair{at.machine, at.npu}, rank);
    if (!is_new)
      refuse_call(kParameter, "ranks ", other->second, " and ", rank, " of communicator ",
          communicator, " are both on NPU ", at.npu,
          "; a rank has an NPU of its own: call torch.npu.set_device(local rank) before the first "
          "collective, or set "
          "ASCEND_RT_VISIBLE_DEVICES");
  }
}

std::string Rendezvous::listen_for_other_machines(
    const std::vector<std::string>& addresses, int rank) {
  // The lower rank of a pair listens.
  bool listens = false, beyond = false;
  for (auto peer = addresses.begin() + rank + 1; peer != addresses.end(); ++peer) {
    listens |= needs_tcp(parse(*peer));
    beyond |= parse(*peer).machine != machine();
  }
  if (!listens) return "";
  const auto ip = beyond ? host_ip() : "127.0.0.1";
  try {
    auto [made, port] = bound(ip, 0);
    tcp_ = std::move(made);
    return text(ip, " ", port);
  } catch (const Error& error) {
    refuse_call(kConnect, error.what(), "; set HCCL_IF_IP to an address of this machine");
  }
}

std::vector<Link> Rendezvous::connect(const std::vector<std::string>& addresses,
    const std::function<std::string(int peer)>& tcp_address, int rank, const Secret& secret,
    Clock::time_point deadline) {
  const int ranks = static_cast<int>(addresses.size());
  std::vector<Link> links(ranks);
  for (int peer = 0; peer < rank;
      ++peer) {  // the higher rank connects; the lower one is already listening
    links[peer].socket = connect_to(peer, parse(addresses[peer]), tcp_address, deadline);
    const auto own = introduction(secret, addresses[peer], rank, ranks);
    if (send(links[peer].socket.get(), &own, sizeof own, MSG_NOSIGNAL) != sizeof own)
      refuse_call(kConnect, "rank ", peer, " closed the connection during set-up");
  }
  // True if the connection is a rank's.
  const auto admit = [&](Arrival& arrival) {
    const auto& from = arrival.from;
    const auto right = introduction(secret, addresses[rank], from.rank, from.ranks);
    if (std::memcmp(&from, &right, sizeof from) != 0) return false;
    if (static_cast<int>(from.ranks) != ranks) {
      refuse_call(kParameter, "rank ", from.rank, " counts ", from.ranks, " ranks, rank ", rank,
          " counts ", ranks, "; it must be the same on all");
    }
    if (static_cast<int>(from.rank) <= rank || from.rank >= from.ranks)
      refuse_call(kParameter, "rank ", from.rank, " connects to rank ", rank, " of ", ranks,
          "; a rank connects to lower ranks");
    if (links[from.rank].socket.get() >= 0)
      refuse_call(kParameter, "two ranks call themselves ", from.rank);
    links[from.rank].socket = std::move(arrival.link);
    return true;
  };
  set_nonblocking(local_);
  if (tcp_.get() >= 0) set_nonblocking(tcp_);
  std::vector<Arrival> arrivals;
  for (int missing = ranks - rank - 1; missing > 0;) {
    std::vector<pollfd> files{
        {tcp_.get(), POLLIN, 0}, {local_.get(), POLLIN, 0}};  // poll() skips a TCP socket of -1
    auto until = deadline;
    for (const auto& each : arrivals) {
      files.push_back({each.link.get(), POLLIN, 0});
      until = std::min(until, each.until);
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    if (Clock::now() >= deadline)
      refuse_call(kTimeout, missing, " of ", ranks,
          " ranks did not connect in time (HCCL_CONNECT_TIMEOUT)");
    if (poll(files.data(), files.size(), static_cast<int>(std::max<int64_t>(left, 0)) + 1) < 0)
      continue;
    for (size_t i = arrivals.size(); i-- > 0;) {
      const bool open = arrivals[i].read(files[i + 2].revents != 0),
                 complete = arrivals[i].complete();
      if (complete && admit(arrivals[i])) --missing;
      if (complete || !open) arrivals.erase(arrivals.begin() + static_cast<long>(i));
    }
    for (size_t i = 0; i < 2; ++i) {
      if (!files[i].revents) continue;
      File link(accept4(files[i].fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      check(link.get() >= 0 || (errno != EMFILE && errno != ENFILE), kOpFailed,
          "no connection of a rank can be accepted: ", std::strerror(errno));
      const bool tcp = files[i].fd == tcp_.get();
      if (link.get() < 0 || (!tcp && !same_user(link))) continue;
      finish(link, tcp);
      if (arrivals.size() >= kArrivals) arrivals.erase(arrivals.begin());
      arrivals.push_back({std::move(link), std::min(deadline, Clock::now() + kHandshake)});
    }
  }
  return links;
}

}  // namespace emu::hccl
