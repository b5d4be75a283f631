// Connections between ranks and what moves over them: Unix sockets within a machine, TCP between machines, one for each pair of
// ranks of a communicator. All messages of a step move side by side and the thread sleeps in poll() in between, so no order of
// calls can block the others, an end of a connection is noticed at once, and an idle wait costs no processor time.
#ifndef ASCEND_EMULATOR_HCCL_TRANSPORT_H
#define ASCEND_EMULATOR_HCCL_TRANSPORT_H
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
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

 private:
  int fd_;
};

// What both ends of a message must agree on; it goes before the message's bytes.
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
  uint64_t count = 0;  // of elements, where it is the same on all ranks
  uint64_t bytes = 0;  // that follow
  std::string describe() const;
};

struct Early {  // a message of a point-to-point call that this rank has not made yet
  Header header;
  std::vector<char> bytes;
};

struct Link {
  File socket;
  std::deque<Early> early;
  bool within_message = false;  // part of one was sent
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

// Why a step could not be completed.
struct Broken : std::runtime_error {
  const Code result;
  Broken(Code result, const std::string& what) : std::runtime_error(what), result(result) {}
};

// Moves all of it. Throws Broken: a peer went away, sent something else, the deadline passed, or `wake` became
// readable; and what check_not_aborted() throws.
void transfer(
    std::vector<Link>& links, const std::vector<Outgoing>& out, const std::vector<Incoming>& in, Deadline deadline, int wake);
// Tells the others why this rank goes no further, as far as they can still be told.
void give_up(std::vector<Link>& links, const std::string& reason);
// Sleeps until the deadline; throws Broken if `wake` becomes readable.
void pause(Deadline deadline, int wake);

// The connections of one rank to all others, made through addresses that each rank publishes.
class Meeting {
 public:
  explicit Meeting(const std::string& ip);
  std::string address() const { return address_; }
  // `addresses` by rank; `token` is the communicator's.
  std::vector<Link> connect(const std::vector<std::string>& addresses, int rank, uint64_t token, Clock::time_point deadline);

 private:
  File tcp_, local_;
  std::string address_;
};

// This machine's address for others: HCCL_IF_IP, HCCL_SOCKET_IFNAME, or the first that is not a loopback.
std::string host_ip();

}  // namespace emu::hccl

#endif  // ASCEND_EMULATOR_HCCL_TRANSPORT_H
