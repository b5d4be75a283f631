// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "communicator.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <utility>

#include "core/cost.h"
#include "core/device.h"
#include "core/rules.h"

namespace emu::hccl {
namespace {

// Of a variable that is a number of `unit`.
int number(const char* variable, int otherwise, int least, const char* unit) {
  const char* value = std::getenv(variable);
  if (!value || !*value) return otherwise;
  char* end = nullptr;
  const long number = std::strtol(value, &end, 10);
  check(!*end && number >= least && number <= 2147483647L, kInvalidParam, variable, " is ", value,
      "; it is a number of ", unit, ", at least ", least);
  return static_cast<int>(number);
}

Clock::time_point after(int seconds) { return Clock::now() + std::chrono::seconds(seconds); }

// A collective of this process while it runs on an NPU. One on the vector cores must not share the
// NPU's links, with MC2 neither: "不支持多通信域并行的场景" (CANN's reference,
// HCCL_OP_EXPANSION_MODE). Sends and receives do not run there.
class Running {
 public:
  Running(const Communicator& on, const Header& call) : on_(on), call_(call) {
    if (call.kind == kSend || call.kind == kReceive || on.ranks == 1) return;
    std::lock_guard lock(calls().mutex);
    for (const auto* other : calls().running)
      if (other->on_.device == on.device && &other->on_ != &on &&
          (other->on_.options.on_vector_cores || on.options.on_vector_cores))
        rule("communicator.one-on-vector-cores", [&] {
          raise(kOpParam, {"NPU ", on.device, " runs ", other->call_.describe(),
                              " on communicator ", other->on_.name,
                              " at the same time; with HCCL_OP_EXPANSION_MODE=AIV "
                              "collectives of several communicators must not overlap"});
        });
    calls().running.insert(this);
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() {
    std::lock_guard lock(calls().mutex);
    calls().running.erase(this);
  }

 private:
  struct Calls {
    std::mutex mutex;
    std::set<const Running*> running;
  };
  static Calls& calls() { return process.part<Calls>(); }
  const Communicator& on_;
  const Header call_;
};

// For torchrun, whose report of the ranks that failed comes last: torch_npu's watchdog aborts the
// process, of which torchrun knows the signal only. The file's form:
// torch/distributed/elastic/multiprocessing/errors (ProcessFailure).
void tell_torchrun(const std::string& reason) {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (!path) return;
  const int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return;  // there is a reason already
  std::string line = "{\"message\": \"";
  for (const char each : reason) {
    if (each == '"' || each == '\\') line += '\\';
    line += static_cast<unsigned char>(each) < 0x20 ? ' ' : each;
  }
  line += text("\", \"timestamp\": ", std::time(nullptr), "}\n");
  if (write(file, line.data(), line.size()) < 0) unlink(path);
  close(file);
}

}  // namespace

// Documented defaults. CANN's minimum of HCCL_CONNECT_TIMEOUT is 120.
int connect_timeout() { return number("HCCL_CONNECT_TIMEOUT", 120, 1, "seconds"); }
int exec_timeout() { return number("HCCL_EXEC_TIMEOUT", 1836, 0, "seconds"); }
uint64_t buffer_size() { return number("HCCL_BUFFSIZE", 200, 1, "MiB"); }
bool on_vector_cores() {
  const char* mode = std::getenv("HCCL_OP_EXPANSION_MODE");
  return mode && std::strcmp(mode, "AIV") == 0;
}

Communicator::Communicator(
    c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int ranks, Options options)
    : name(std::move(name)),
      rank(rank),
      ranks(ranks),
      device(current_device()),
      options(options),
      store_(std::move(store)),
      wake_(eventfd(0, EFD_CLOEXEC)) {
  connect();
}

Communicator::~Communicator() = default;

// "Each communicator occupies 2 x HCCL_BUFFSIZE memory, which is used for receiving and sending
// memory" (Huawei's "HCCL_BUFFSIZE"), "for sharing data between two NPUs": a single rank needs
// none.
Buffers::Buffers(const std::string& communicator, int ranks, uint64_t size)
    : device_(current_device()) {
  if (ranks == 1) return;
  const uint64_t bytes = 2 * (size << 20);
  try {
    device(device_).reserve_physical(bytes);
  } catch (const Error& error) {
    throw Error(error.status, text("the buffers of communicator ", communicator, ", 2 x ", size,
                                  " MiB (HCCL_BUFFSIZE): ", error.what()));
  }
  bytes_ = bytes;
}

Buffers::~Buffers() {
  if (bytes_) device(device_).release_physical(bytes_);
}

void Communicator::claim(uint8_t kind) {
  const auto of_experts = [](uint8_t each) { return each == kDispatch || each == kCombine; };
  std::lock_guard lock(order_mutex_);
  if (!claimed_) claimed_ = kind;
  check(of_experts(kind) == of_experts(*claimed_), kOpParam, kind_name(kind), " on communicator ",
      name, ", on which ", kind_name(*claimed_),
      " was called before: MoE dispatch and combine need a communicator without other operators; "
      "create a ",
      "group only for them");
}

int Communicator::next_use(const std::string& key) {
  std::lock_guard lock(order_mutex_);
  return uses_[key]++;
}

Ticket::Ticket(std::shared_ptr<Communicator> on, std::set<int> lanes)
    : on_(std::move(on)), lanes_(std::move(lanes)) {
  on_->started();
  std::lock_guard lock(on_->order_mutex_);
  number_ = on_->issued_++;
  for (const int lane : lanes_) on_->waiting_[lane].insert(number_);
}

uint32_t Ticket::overtaken(int lane) const {
  std::lock_guard lock(on_->order_mutex_);
  const auto& waiting = on_->waiting_[lane];
  return static_cast<uint32_t>(std::distance(waiting.begin(), waiting.lower_bound(number_)));
}

void Ticket::end() {
  if (std::exchange(ended_, true)) return;
  {
    std::lock_guard lock(on_->order_mutex_);
    for (const int lane : lanes_) on_->waiting_[lane].erase(number_);
  }
  on_->finished();
}

void Communicator::connect() {
  links_ = std::vector<Link>(1);
  if (ranks == 1) return;
  const auto until = after(connect_timeout());
  Rendezvous rendezvous(device);
  const std::string round = text(rendezvous_count_++, "/");
  const auto own = text("communicator ", name, ", rank ", rank, " of ", ranks, ": ");
  const auto asked = [&](int peer, const std::string& key, auto&& action) {
    try {
      return action(round + key);
    } catch (const std::exception& error) {
      const std::string reason = error_of(error).what();
      if (reason.find("timeout") != std::string::npos ||
          reason.find("timed out") != std::string::npos)
        refuse_call(kTimeout, own, "rank ", peer, " did not come within ", connect_timeout(),
            " s (HCCL_CONNECT_TIMEOUT); look at its output");
      if (dynamic_cast<const c10::DistNetworkError*>(&error))
        refuse_call(kRemote, own,
            "rank 0, which has the store, ended or closed the connection; look at its output");
      refuse_call(kInternal, own, "rank 0's store: ", reason.substr(0, 200));
    }
  };
  // Each value is followed by its signature: another process may write to the store.
  const auto publish = [&](const std::string& key, const std::string& value) {
    asked(rank, key, [&](const auto& at) {
      const auto signed_value = text(value, " ", options.secret.sign(text(at, "=", value)));
      store_->set(at, std::vector<uint8_t>(signed_value.begin(), signed_value.end()));
    });
  };
  const auto published = [&](int peer, const std::string& key) {
    const auto bytes = asked(peer, key, [&](const auto& at) { return store_->get(at); });
    const std::string all(bytes.begin(), bytes.end()), value = all.substr(0, all.find_last_of(' '));
    if (all != text(value, " ", options.secret.sign(text(round, key, "=", value))))
      refuse_call(kConnect, own, "what the store has of rank ", peer,
          " is not signed with the communicator's secret: the rank failed, has another root info, "
          "or a stranger writes to the "
          "store");
    return value;
  };
  store_->setTimeout(std::chrono::seconds(connect_timeout()));
  publish(text(rank), rendezvous.address());
  std::vector<std::string> addresses;
  for (int peer = 0; peer < ranks; ++peer) addresses.push_back(published(peer, text(peer)));
  Rendezvous::check_npus(name, addresses);
  if (const auto tcp = rendezvous.listen_for_other_machines(addresses, rank); !tcp.empty())
    publish(text(rank, "/tcp"), tcp);
  links_ = rendezvous.connect(
      addresses, [&](int peer) { return published(peer, text(peer, "/tcp")); }, rank,
      options.secret, until);
}

Deadline Communicator::deadline() const {
  return options.exec_timeout ? Deadline(after(options.exec_timeout)) : std::nullopt;
}

void Communicator::stop(Code result, const std::string& text) {
  std::lock_guard lock(message_mutex_);
  if (error_) return;
  message_ = text;
  error_ = result;
}

c10::intrusive_ptr<c10d::Store> Communicator::store() const { return store_; }

std::string Communicator::message() {
  std::lock_guard lock(message_mutex_);
  return message_;
}

void Communicator::fail(const Header& call, Code result, const std::string& message) {
  stop(result, text(call.describe(), " on communicator ", name, " (rank ", rank, " of ", ranks,
                   ", call ", calls_, "): ", message));
  notify_failure(links_, this->message());
  tell_torchrun(this->message());
  throw Error(kOpFailed, this->message(), true);
}

void Communicator::perform(const Header& call, const std::function<void()>& body,
    const std::vector<Ticket*>& tickets, fault::Kind fault) {
  std::lock_guard lock(mutex_);
  tickets_ = &tickets;
  if (error_)
    throw Error(
        kOpFailed, text(call.describe(), ": the communicator failed earlier: ", message()), true);
  ++calls_;
  try {
    const Running running(*this, call);
    static const int delay = number("ASCEND_EMULATOR_HCCL_DELAY", 0, 0, "milliseconds");
    if (delay) pause(Clock::now() + std::chrono::milliseconds(delay), wake_.get());
    if (fault == fault::Kind::timeout) {
      pause(deadline(), wake_.get());
      throw TransferError(
          kTimeout, "nothing from the other ranks until HCCL_EXEC_TIMEOUT (injected)");
    }
    if (fault == fault::Kind::drop && ranks > 1) {
      for (const auto& link : links_) {
        if (link.socket.get() >= 0) shutdown(link.socket.get(), SHUT_RDWR);
      }
      throw TransferError(kRemote, "the connections broke (injected)");
    }
    body();
  } catch (const TransferError& failed) {
    const Error error(kOpParam, failed.what(), failed.result != kParameter);
    fail(call, failed.result, classified(error, kUndefined).what());
  } catch (const std::bad_alloc&) {
    fail(call, kMemory, "the host has no memory for it");
  } catch (const std::exception& failed) {  // possibly within a message
    const auto error = classified(error_of(failed), kUndefined);
    fail(call, error.status == kOpParam ? kParameter : kSuspending, error.what());
  }
  for (auto* ticket : tickets) ticket->end();
}

void Communicator::exchange(
    const Header& call, const std::vector<Part>& out, const std::vector<Part>& in) {
  std::vector<Outgoing> outgoing;
  std::vector<Incoming> incoming;
  Header header = call;
  header.modelled_start = running_stream().modelled;
  double sent = 0;
  if (!tickets_->empty()) header.overtaken = tickets_->front()->overtaken(Ticket::kCollectives);
  for (int step = 1; step < ranks; ++step) {  // starting with the next rank
    const int peer = (rank + step) % ranks;
    outgoing.push_back({peer, header, out.empty() ? nullptr : out[peer].data});
    incoming.push_back({peer, header, in.empty() ? nullptr : in[peer].data});
    outgoing.back().header.bytes = out.empty() ? 0 : out[peer].bytes;
    incoming.back().header.bytes = in.empty() ? 0 : in[peer].bytes;
    sent += static_cast<double>(outgoing.back().header.bytes);
  }
  cost::add_sent(sent, ranks);
  join(transfer(links_, outgoing, incoming, deadline(), wake_.get()));
}

// Sends are synchronous: they complete when the receiver has made its call ("HcclSend"). So a
// receive sends its header.
void Communicator::exchange(const std::vector<PointToPoint>& items) {
  std::vector<Outgoing> outgoing;
  std::vector<Incoming> incoming;
  std::deque<PointToPoint> to_self;
  for (const auto& item : items) {
    const bool sends = item.header.kind == kSend;
    if (item.peer == rank) {
      if (to_self.empty() || to_self.front().header.kind == item.header.kind) {
        to_self.push_back(item);
        continue;
      }
      const auto& other = to_self.front();
      if (other.header.bytes != item.header.bytes)
        throw TransferError(
            kParameter, "a send to this rank itself and its receive have different sizes");
      std::memmove(
          sends ? other.data : item.data, sends ? item.data : other.data, item.header.bytes);
      to_self.pop_front();
      continue;
    }
    Header with = item.header;
    with.modelled_start = running_stream().modelled;
    with.kind = kSend;
    const int lane = Ticket::lane(item);
    for (const auto* ticket : *tickets_)
      if (ticket->has(lane) && with.overtaken == kNone) with.overtaken = ticket->overtaken(lane);
    Header without = with;
    without.bytes = 0;
    without.kind = kReceive;
    outgoing.push_back({item.peer, sends ? with : without, item.data});
    incoming.push_back({item.peer, sends ? without : with, item.data});
  }
  if (!to_self.empty())
    throw TransferError(kParameter,
        "a send to this rank itself, or a receive from it, is alone; they must be in one group or "
        "batch");
  join(transfer(links_, outgoing, incoming, deadline(), wake_.get()));
}

// On the modelled clock an exchange begins with the last of its ranks.
void Communicator::join(double latest) {
  auto& stream = running_stream();
  stream.modelled = std::max(stream.modelled, latest);
}

char* Communicator::scratch(uint64_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_.reset();
    scratch_.reset(new char[bytes]);
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

void Communicator::finished() {
  if (--pending_ == 0) {
    std::lock_guard lock(idle_mutex_);
    idle_.notify_all();
  }
}

void Communicator::close() {
  // torch_npu synchronizes before it destroys a communicator; other programs may not.
  if (!error_) {
    std::unique_lock lock(idle_mutex_);
    idle_.wait_for(lock, std::chrono::seconds(1), [&] { return pending_ == 0; });
  }
  suspend();
  std::lock_guard lock(mutex_);
  stop(kSuspending, text("communicator ", name, " was destroyed"));
  links_.clear();
  options.buffers.reset();
}

void Communicator::abandon(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (error_) return;
  stop(kInternal, text("on communicator ", name, " (rank ", rank, " of ", ranks, "): ", reason));
  notify_failure(links_, message());
}

void Communicator::suspend() {
  const uint64_t one = 1;
  if (write(wake_.get(), &one, sizeof one) < 0) return;  // already readable
}

void Communicator::resume() {
  std::lock_guard lock(mutex_);
  pollfd file{wake_.get(), POLLIN, 0};
  uint64_t count;
  if (poll(&file, 1, 0) > 0 && read(wake_.get(), &count, sizeof count) < 0) return;
  if (!error_ && file.revents == 0) return;
  connect();
  std::lock_guard text_lock(message_mutex_);
  message_.clear();
  error_ = kSuccess;
}

}  // namespace emu::hccl
