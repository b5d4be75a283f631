// A communicator: a rank's connections to the others, its state, and how an operation runs on them.
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

// Bytes that go to, or come from, one rank.
struct Part {
  void* data = nullptr;
  uint64_t bytes = 0;
};
struct PointToPoint {
  int peer;
  Header header;  // kSend or kReceive
  void* data;
};

// Faults on demand for collective and point-to-point calls, counted from 1 in each process: ASCEND_EMULATOR_HCCL_HANG=n, the nth
// does nothing until its timeout; ASCEND_EMULATOR_HCCL_DROP=n, the connections break at the nth;
// ASCEND_EMULATOR_HCCL_DELAY=milliseconds before each.
enum class Fault { none, hang, drop };
Fault next_fault();

class Communicator {
 public:
  // Meets the other ranks through the store, which holds keys of this communicator only.
  Communicator(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int ranks, int exec_timeout);
  ~Communicator();

  // Runs an operation, one at a time and in the order of the calls; on the stream's thread. A failure is kept, and fails all
  // later ones.
  void perform(const Header& call, const std::function<void()>& body);
  // Within perform: to each rank its part, from each rank its part, with the call's header on both. Empty parts are sent too, so
  // that all ranks learn what the others called. This rank's own parts are not looked at.
  void exchange(const Header& call, const std::vector<Part>& out, const std::vector<Part>& in);
  void exchange(const std::vector<PointToPoint>& items);
  char* scratch(uint64_t bytes);

  void started() { ++pending_; }
  void finished();
  // Ends what runs, after a moment for what is on its way, and closes the connections.
  void close();
  void suspend();
  void resume();  // connects again; all ranks do

  int error() const { return error_; }
  std::string message();

  const std::string name;
  const int rank, ranks, device;
  c10::intrusive_ptr<c10d::Store> store() const;

 private:
  void connect();
  void stop(Code result, const std::string& message);  // notes the failure, the first one counts
  [[noreturn]] void fail(const Header& call, Code result, const std::string& message);
  Deadline deadline() const;

  c10::intrusive_ptr<c10d::Store> store_;
  const int exec_timeout_;
  int meetings_ = 0;
  std::mutex mutex_;  // of the links: one operation at a time
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
int exec_timeout();     // seconds, 0 is for ever

// The reduction of the ranks' values, in the order of the ranks, wide inside and rounded once; `out` may be one of them.
void reduce(void* out, const std::vector<const void*>& ranks, uint64_t count, int type, int op);

}  // namespace emu::hccl

#endif  // ASCEND_EMULATOR_HCCL_COMMUNICATOR_H
