// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Communicator: a rank's connections to its peers, its state, and the execution of operations.
#pragma once
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "core/fault.h"
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

// Device memory that two buffers take, each of `size` MiB, on the current NPU: of one communicator,
// or of all those of the process that name the same buffer.
class Buffers {
 public:
  Buffers(const std::string& communicator, int ranks, uint64_t size);
  ~Buffers();

 private:
  const int device_;
  uint64_t bytes_ = 0;
};

// What a communicator is created with.
struct Options {
  int exec_timeout;      // seconds, 0: no timeout
  uint64_t buffer_size;  // MiB
  bool on_vector_cores;  // expansion mode AIV
  Secret secret;
  std::shared_ptr<Buffers> buffers{};
};
int connect_timeout();  // seconds
// By the environment variables.
int exec_timeout();
uint64_t buffer_size();
bool on_vector_cores();

class Ticket;

class Communicator {
 public:
  // Connects to the other ranks through the store, whose keys belong to this communicator only.
  Communicator(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int ranks,
      Options options);
  ~Communicator();

  // Runs one operation at a time on the stream's thread. A failure fails all later operations.
  // `tickets` are of the calls, if their order is compared with the other ranks'; `fault` is an
  // injected timeout or drop.
  void perform(const Header& call, const std::function<void()>& body,
      const std::vector<Ticket*>& tickets = {}, fault::Kind fault = fault::Kind::none);
  // Within perform(): sends each rank its part and receives each rank's part, with the call's
  // header. Empty parts are sent too, so that ranks can compare their calls. This rank's own parts
  // are ignored.
  void exchange(const Header& call, const std::vector<Part>& out, const std::vector<Part>& in);
  void exchange(const std::vector<PointToPoint>& items);
  char* scratch(uint64_t bytes);

  void started() { ++pending_; }
  void finished();
  // Waits briefly for pending operations, ends them, and closes the connections.
  void close();
  // After an operator failed outside of perform(): the other ranks learn of it, if the communicator
  // has not failed before.
  void abandon(const std::string& reason);
  void suspend();
  void resume();  // reconnects; must be called on all ranks

  int error() const { return error_; }
  std::string message();
  // To be called before each call is issued. Throws if MoE dispatch or combine shares the
  // communicator with other operators: "该通信域中不允许有其他算子" (torch_npu's documentation of
  // npu_moe_distribute_dispatch_v2).
  void claim(uint8_t kind);
  // Number of calls with the same key; equal on all ranks that make equally many calls.
  int next_use(const std::string& key);

  const std::string name;
  const int rank, ranks, device;
  Options options;
  c10::intrusive_ptr<c10d::Store> store() const;

 private:
  friend class Ticket;
  void connect();
  void join(double latest);
  void stop(Code result, const std::string& message);  // keeps the first failure
  [[noreturn]] void fail(const Header& call, Code result, const std::string& message);
  Deadline deadline() const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rendezvous_count_ = 0;
  std::mutex order_mutex_;          // guards the next four
  std::optional<uint8_t> claimed_;  // operation of the first call
  uint64_t issued_ = 0;
  std::map<int, std::set<uint64_t>> waiting_;  // calls that have not run yet, by lane (Ticket)
  std::map<std::string, int> uses_;
  std::mutex mutex_;  // guards the links: one operation at a time
  std::vector<Link> links_;
  std::unique_ptr<char[]> scratch_;
  uint64_t scratch_bytes_ = 0;
  uint64_t calls_ = 0;
  const std::vector<Ticket*>* tickets_ = nullptr;  // of the operation that runs
  File wake_;
  std::atomic<int> error_{0};
  std::mutex message_mutex_;
  std::string message_;
  std::atomic<int> pending_{0};
  std::mutex idle_mutex_;
  std::condition_variable idle_;
};

// A call's place in the order in which its rank issued the communicator's calls, until it has run
// or was dropped from its stream's queue. Calls of a replayed graph have none. A lane holds calls
// that must match in order: all collectives, and the sends to, or receives from, each peer.
class Ticket {
 public:
  Ticket(std::shared_ptr<Communicator> on, std::set<int> lanes);
  ~Ticket() { end(); }
  static int lane(const PointToPoint& item) { return 2 * item.peer + (item.header.kind == kSend); }
  static constexpr int kCollectives = -1;
  uint32_t overtaken(int lane) const;  // earlier calls of the lane that have not run yet
  bool has(int lane) const { return lanes_.count(lane) > 0; }
  void end();

 private:
  std::shared_ptr<Communicator> on_;
  std::set<int> lanes_;
  uint64_t number_ = 0;
  bool ended_ = false;
};

// Reduces the ranks' values in rank order and in their type, which each step rounds to; `out` may
// alias an input.
void reduce(void* out, const std::vector<const void*>& ranks, uint64_t count, int type, int op);

}  // namespace emu::hccl
