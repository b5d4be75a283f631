// Communicator: a rank's connections to its peers, its state, and the execution of operations.
#ifndef ASCEND_EMULATOR_HCCL_COMMUNICATOR_H
#define ASCEND_EMULATOR_HCCL_COMMUNICATOR_H
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>

#include "transport.h"

namespace c10d {
class Store;
}

namespace emu::hccl {

// Buffer sent to, or received from, one rank.
struct Part {
  void* data = nullptr;
  uint64_t bytes = 0;
};
struct PointToPoint {
  int peer;
  Header header;  // kSend or kReceive
  void* data;
};

// Fault injection for collective and point-to-point calls, counted from 1 in each process: ASCEND_EMULATOR_HCCL_HANG=n, the nth
// call hangs until its timeout; ASCEND_EMULATOR_HCCL_DROP=n, it loses its connections; ASCEND_EMULATOR_HCCL_DELAY=milliseconds
// before each call.
enum class Fault { none, hang, drop };
Fault next_fault();

class Communicator {
 public:
  // Connects to the other ranks through the store, whose keys belong to this communicator only.
  Communicator(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int ranks, int exec_timeout);
  ~Communicator();

  // Runs one operation at a time on the stream's thread. A failure fails all later operations.
  void perform(const Header& call, const std::function<void()>& body);
  // Within perform(): sends each rank its part and receives each rank's part, with the call's header. Empty parts are sent too,
  // so that ranks can compare their calls. This rank's own parts are ignored.
  void exchange(const Header& call, const std::vector<Part>& out, const std::vector<Part>& in);
  void exchange(const std::vector<PointToPoint>& items);
  char* scratch(uint64_t bytes);

  void started() { ++pending_; }
  void finished();
  // Waits briefly for pending operations, ends them, and closes the connections.
  void close();
  void suspend();
  void resume();  // reconnects; must be called on all ranks

  int error() const { return error_; }
  std::string message();

  const std::string name;
  const int rank, ranks, device;
  c10::intrusive_ptr<c10d::Store> store() const;

 private:
  void connect();
  void stop(Code result, const std::string& message);  // keeps the first failure
  [[noreturn]] void fail(const Header& call, Code result, const std::string& message);
  Deadline deadline() const;

  c10::intrusive_ptr<c10d::Store> store_;
  const int exec_timeout_;
  int rendezvous_count_ = 0;
  std::mutex mutex_;  // guards the links: one operation at a time
  std::vector<Link> links_;
  std::unique_ptr<char[]> scratch_;
  uint64_t scratch_bytes_ = 0;
  uint64_t calls_ = 0;
  File wake_;
  std::atomic<int> error_{0};
  std::mutex message_mutex_;
  std::string message_;
  std::atomic<int> pending_{0};
  std::mutex idle_mutex_;
  std::condition_variable idle_;
};

int connect_timeout();  // seconds
int exec_timeout();     // seconds, 0: no timeout

// Reduces the ranks' values in rank order, 16-bit types in float32 with one rounding; `out` may alias an input.
void reduce(void* out, const std::vector<const void*>& ranks, uint64_t count, int type, int op);

}  // namespace emu::hccl

#endif  // ASCEND_EMULATOR_HCCL_COMMUNICATOR_H
