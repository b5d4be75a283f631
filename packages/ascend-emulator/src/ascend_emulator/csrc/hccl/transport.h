// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Transport between ranks: one connection per pair of ranks, over Unix sockets within a machine and
// TCP between machines. All messages of a step progress concurrently and the thread waits in
// poll(), so the order of calls cannot deadlock, a closed connection is noticed immediately, and
// waiting uses no CPU.
#pragma once
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/stream.h"
#include "types.h"

namespace emu::hccl {

class File {
 public:
  explicit File(int fd = -1) : fd_(fd) {}
  File(File&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~File();
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Message header; both ends must agree on it.
enum CallKind : uint8_t {
  kBarrier,
  kAllReduce,
  kAllGather,
  kAllGatherV,
  kReduceScatter,
  kReduceScatterV,
  kBroadcast,
  kReduce,
  kScatter,
  kAllToAll,
  kAllToAllV,
  kSend,
  kReceive,
  kFailed,
  // Operators that compute and communicate (ops/mc2/mc2.h).
  kDispatch,
  kCombine,
  kMatmulAllReduce,
  kAllGatherMatmul,
  kMatmulReduceScatter,
  kDistributeBarrier,
  kAllToAllGrouped,
  kGroupedAllToAll,
  kAllToAllMatmul,
  kMatmulAllToAll
};
const char* kind_name(uint8_t kind);
constexpr uint32_t kNone = 0xffffffff;

struct Header {
  uint8_t kind = kBarrier, type = 0, op = 0xff, unused = 0;
  uint32_t root = kNone;
  uint64_t count = 0;  // of elements, if equal on all ranks
  uint64_t bytes = 0;  // of the payload
  uint32_t overtaken =
      kNone;  // calls that were issued earlier and have not run yet (Ticket); kNone: not known
  uint32_t reserved = 0;
  double modelled_start = 0;  // of this rank, in seconds of the modelled clock
  std::string describe() const;
};

struct UnexpectedMessage {  // point-to-point message that arrived before this rank's call
  Header header;
  std::vector<char> bytes;
};

// Limits of a peer's messages that arrived before this rank's call.
constexpr uint64_t kEarlyMessages = 4096, kEarlyBytes = 4ull << 30;

struct Link {
  File socket;
  std::deque<UnexpectedMessage> unexpected;
  uint64_t unexpected_bytes = 0;
  bool within_message = false;  // a message was sent in part
};

struct Outgoing {
  int peer;
  Header header;
  const void* data;
};
struct Incoming {
  int peer;
  Header header;  // as expected
  void* data;
};

// Reason why a step failed.
struct TransferError : std::runtime_error {
  const Code result;
  TransferError(Code result, const std::string& what) : std::runtime_error(what), result(result) {}
};

// Transfers all messages. Throws TransferError if a peer closed its connection or sent another
// call, the deadline passed, or `wake` became readable; and check_not_aborted()'s error. Returns
// the latest start of the peers on the modelled clock.
double transfer(std::vector<Link>& links, const std::vector<Outgoing>& out,
    const std::vector<Incoming>& in, Deadline deadline, int wake);
// Sends the reason of this rank's failure to all peers that are still reachable.
void notify_failure(std::vector<Link>& links, const std::string& reason);
// Sleeps until the deadline; throws TransferError if `wake` becomes readable.
void pause(Deadline deadline, int wake);

// What the ranks of a communicator know and no other process: from HcclRootInfo, or from the rank
// table. It is never sent or stored. Ranks sign with it what they publish and how they introduce
// themselves.
class Secret {
 public:
  explicit Secret(const std::string& key);
  static Secret random();
  const std::string& key() const { return key_; }
  static constexpr size_t kSignature = 40;
  std::string sign(
      const std::string& message) const;  // HMAC (RFC 2104) with SHA-1's hexadecimal digests
  Secret derived(const std::string& purpose) const { return Secret(sign("derived " + purpose)); }

 private:
  std::string key_;
};

// Establishes one rank's connections to its peers. Ranks on one machine connect over Unix sockets.
class Rendezvous {
 public:
  explicit Rendezvous(int npu);
  // What this rank publishes: its machine, its NPU, and its Unix socket.
  std::string address() const { return address_; }
  // Throws if two ranks are on one NPU. `addresses` by rank.
  static void check_npus(
      const std::string& communicator, const std::vector<std::string>& addresses);
  // Listens on TCP if a peer is on another machine; returns the address to publish for those, or
  // "".
  std::string listen_for_other_machines(const std::vector<std::string>& addresses, int rank);
  // `tcp_address` asks for what a peer on another machine published.
  std::vector<Link> connect(const std::vector<std::string>& addresses,
      const std::function<std::string(int peer)>& tcp_address, int rank, const Secret& secret,
      Clock::time_point deadline);

 private:
  File tcp_, local_;
  std::string address_;
};

// This machine's address for other ranks: HCCL_IF_IP, HCCL_SOCKET_IFNAME, or the first non-loopback
// address.
std::string host_ip();
// Where HCCL's root listens: that address if the user chose it, otherwise the loopback address, for
// ranks of this machine.
std::string root_ip();
// A TCP socket that is bound to this address and port (0: any), and its port.
std::pair<File, int> bound(const std::string& ip, int port);
// Identifies the kernel and network namespace: processes with the same value reach each other's
// loopback address and abstract Unix sockets.
std::string machine();

}  // namespace emu::hccl
