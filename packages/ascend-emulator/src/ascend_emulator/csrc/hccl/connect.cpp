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

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <map>

#include "core/device.h"
#include "transport.h"

namespace emu::hccl {
namespace {

struct Handshake {
  Token token;
  uint32_t rank, ranks;
};

File make_socket(int family) {
  File made(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  check(made.get() >= 0, kOpFailed, "a socket cannot be made: ", std::strerror(errno));
  return made;
}

// Identifies the kernel and network namespace: processes with the same value can connect over abstract Unix sockets.
std::string machine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot, space(64, '\0');
  std::getline(file, boot);
  const auto length = readlink("/proc/self/ns/net", space.data(), space.size());
  space.resize(std::max<ssize_t>(length, 0));
  return boot + "/" + space;
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
  check(inet_pton(AF_INET, ip.c_str(), &address.sin_addr) == 1, kInvalidParam, "not an IPv4 address: ", ip, " (HCCL_IF_IP)");
  return address;
}

// Waits for a file descriptor; false on timeout.
bool ready(int fd, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
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
  check(std::string(choice) == "tcp", kInvalidParam, "ASCEND_EMULATOR_HCCL_TRANSPORT is ", choice,
      "; allowed: tcp, or unset for Unix sockets within a machine");
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

bool needs_tcp(const Address& peer) { return use_tcp() || peer.transport == "tcp" || peer.machine != machine(); }

// Other users of the machine can connect to an abstract Unix socket.
bool same_user(const File& link) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(link.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

void set_nonblocking(const File& file) { fcntl(file.get(), F_SETFL, fcntl(file.get(), F_GETFL) | O_NONBLOCK); }

File connect_to(int peer, const Address& at, const std::function<std::string(int)>& tcp_address_of, Clock::time_point deadline) {
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
    if (!ready(link.get(), POLLOUT, deadline))
      error = ETIMEDOUT;
    else
      getsockopt(link.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error)
    refuse_call(kConnect, "no connection to rank ", peer, " at ", place, ": ", std::strerror(error),
        "; is it reachable from this machine (HCCL_IF_IP, HCCL_SOCKET_IFNAME)?");
  if (!tcp && !same_user(link)) refuse_call(kConnect, "rank ", peer, " is a process of another user");
  finish(link, tcp);
  return link;
}

}  // namespace

std::string host_ip() {
  if (const char* ip = std::getenv("HCCL_IF_IP"); ip && *ip) return ip;
  // HCCL_SOCKET_IFNAME: "eth,enp" prefixes, "=eth0" names, "^…" all but these (Huawei's "Environment Variables").
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
  std::vector<std::tuple<int, std::string, std::string>> found;  // order: others, docker, loopback; then by name
  for (auto* one = all; one; one = one->ifa_next) {
    if (!one->ifa_addr || one->ifa_addr->sa_family != AF_INET || !(one->ifa_flags & IFF_UP)) continue;
    const std::string name = one->ifa_name;
    if (!rule.empty() && matches(name) == without) continue;
    char ip[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(one->ifa_addr)->sin_addr, ip, sizeof ip);
    found.emplace_back(one->ifa_flags & IFF_LOOPBACK ? 2 : name.starts_with("docker") ? 1 : 0, name, ip);
  }
  freeifaddrs(all);
  check(!found.empty() || rule.empty(), kInvalidParam, "no network interface fits HCCL_SOCKET_IFNAME=",
      std::getenv("HCCL_SOCKET_IFNAME") ? std::getenv("HCCL_SOCKET_IFNAME") : "");
  return found.empty() ? "127.0.0.1" : std::get<2>(*std::min_element(found.begin(), found.end()));
}

Token random_token() {
  Token token;
  check(getrandom(&token, sizeof token, 0) == sizeof token, kOpFailed, "getrandom: ", std::strerror(errno));
  return token;
}

Rendezvous::Rendezvous(int npu) : local_(make_socket(AF_UNIX)) {
  static std::atomic<int> number{0};
  const auto name = text("ascend-emulator-", getpid(), "-", number++, "-", hex(random_token()[0]));
  auto [local, local_length] = local_address(name);
  check(bind(local_.get(), reinterpret_cast<sockaddr*>(&local), local_length) == 0 && listen(local_.get(), 128) == 0, kOpFailed,
      "cannot listen on a Unix socket: ", std::strerror(errno));
  address_ = text(machine(), " ", physical_id(npu), " ", name, " ", use_tcp() ? "tcp" : "any");
}

// A rank is an NPU of the communicator: "每个通信对象(例如一个NPU就是一个通信对象)…称为一个rank" (Huawei's HCCL user guide,
// 通信域管理); "the entered device list cannot contain duplicate device IDs" (HcclCommInitAll).
void Rendezvous::check_npus(const std::string& communicator, const std::vector<std::string>& addresses) {
  std::map<std::pair<std::string, std::string>, size_t> ranks;
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    const auto at = parse(addresses[rank]);
    const auto [other, is_new] = ranks.emplace(std::pair{at.machine, at.npu}, rank);
    if (!is_new)
      refuse_call(kParameter, "ranks ", other->second, " and ", rank, " of communicator ", communicator, " are both on NPU ",
          at.npu,
          "; a rank has an NPU of its own: call torch.npu.set_device(local rank) before the first collective, or set "
          "ASCEND_RT_VISIBLE_DEVICES");
  }
}

std::string Rendezvous::listen_for_other_machines(const std::vector<std::string>& addresses, int rank) {
  // The lower rank of a pair listens.
  if (std::none_of(addresses.begin() + rank + 1, addresses.end(), [](const auto& peer) { return needs_tcp(parse(peer)); }))
    return "";
  const auto ip = host_ip();
  tcp_ = make_socket(AF_INET);
  auto address = tcp_address(ip, 0);
  socklen_t length = sizeof address;
  check(bind(tcp_.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(tcp_.get(), 128) == 0 &&
            getsockname(tcp_.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0,
      kOpFailed, "cannot listen on ", ip, ": ", std::strerror(errno), "; set HCCL_IF_IP to an address of this machine");
  return text(ip, " ", ntohs(address.sin_port));
}

std::vector<Link> Rendezvous::connect(const std::vector<std::string>& addresses,
    const std::function<std::string(int peer)>& tcp_address, int rank, const Token& token, Clock::time_point deadline) {
  const int ranks = static_cast<int>(addresses.size());
  std::vector<Link> links(ranks);
  const Handshake handshake{token, static_cast<uint32_t>(rank), static_cast<uint32_t>(ranks)};
  for (int peer = 0; peer < rank; ++peer) {  // the higher rank connects; the lower one is already listening
    links[peer].socket = connect_to(peer, parse(addresses[peer]), tcp_address, deadline);
    if (send(links[peer].socket.get(), &handshake, sizeof handshake, MSG_NOSIGNAL) != sizeof handshake)
      refuse_call(kConnect, "rank ", peer, " closed the connection during set-up");
  }
  for (int missing = ranks - rank - 1; missing > 0;) {
    pollfd files[] = {{tcp_.get(), POLLIN, 0}, {local_.get(), POLLIN, 0}};  // poll() skips a TCP socket of -1
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) refuse_call(kTimeout, missing, " of ", ranks, " ranks did not connect in time (HCCL_CONNECT_TIMEOUT)");
    if (poll(files, 2, static_cast<int>(left)) <= 0) continue;
    for (const auto& file : files) {
      if (!file.revents) continue;
      File link(accept4(file.fd, nullptr, nullptr, SOCK_CLOEXEC));
      if (link.get() < 0 || (file.fd == local_.get() && !same_user(link))) continue;
      finish(link, file.fd == tcp_.get());
      Handshake from{};
      const auto handshake_deadline =
          std::min(deadline, Clock::now() + std::chrono::seconds(5));  // other programs may connect to the port
      if (!ready(link.get(), POLLIN, handshake_deadline) || recv(link.get(), &from, sizeof from, MSG_DONTWAIT) != sizeof from ||
          from.token != token)
        continue;
      if (from.ranks != handshake.ranks) {
        refuse_call(kParameter, "rank ", from.rank, " counts ", from.ranks, " ranks, rank ", rank, " counts ", ranks,
            "; it must be the same on all");
      }
      if (from.rank <= handshake.rank || from.rank >= from.ranks)
        refuse_call(
            kParameter, "rank ", from.rank, " connects to rank ", rank, " of ", ranks, "; a rank connects to lower ranks");
      if (links[from.rank].socket.get() >= 0) refuse_call(kParameter, "two ranks call themselves ", from.rank);
      set_nonblocking(link);
      links[from.rank].socket = std::move(link);
      --missing;
    }
  }
  return links;
}

}  // namespace emu::hccl
