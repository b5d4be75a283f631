#include "communicator.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unistd.h>

#include <cstring>

#include "core/device.h"

namespace emu::hccl {
namespace {

int seconds(const char* variable, int otherwise, int least) {
  const char* value = std::getenv(variable);
  if (!value || !*value) return otherwise;
  char* end = nullptr;
  const long number = std::strtol(value, &end, 10);
  check(!*end && number >= least && number <= 2147483647L, kInvalidParam, variable, " is ", value,
      "; it is a number of seconds, at least ", least);
  return static_cast<int>(number);
}

uint64_t hash(const std::string& text) {
  uint64_t value = 1469598103934665603ull;
  for (const unsigned char each : text) value = (value ^ each) * 1099511628211ull;
  return value;
}

Clock::time_point after(int seconds) { return Clock::now() + std::chrono::seconds(seconds); }

}  // namespace

// Documented defaults. CANN's minimum of HCCL_CONNECT_TIMEOUT is 120.
int connect_timeout() { return seconds("HCCL_CONNECT_TIMEOUT", 120, 1); }
int exec_timeout() { return seconds("HCCL_EXEC_TIMEOUT", 1836, 0); }

Fault next_fault() {
  static std::atomic<int> calls{0};
  static const int hang = seconds("ASCEND_EMULATOR_HCCL_HANG", 0, 1), drop = seconds("ASCEND_EMULATOR_HCCL_DROP", 0, 1);
  const int call = ++calls;
  return call == hang ? Fault::hang : call == drop ? Fault::drop : Fault::none;
}

Communicator::Communicator(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int ranks, int exec_timeout)
    : name(std::move(name)),
      rank(rank),
      ranks(ranks),
      device(current_device()),
      store_(std::move(store)),
      exec_timeout_(exec_timeout),
      wake_(eventfd(0, EFD_CLOEXEC)) {
  connect();
}

Communicator::~Communicator() = default;

void Communicator::connect() {
  links_ = std::vector<Link>(1);
  if (ranks == 1) return;
  const auto until = after(connect_timeout());
  Rendezvous rendezvous(host_ip());
  const std::string round = text(rendezvous_count_++, "/");
  std::vector<std::string> addresses(ranks);
  int peer = rank;
  try {
    store_->setTimeout(std::chrono::seconds(connect_timeout()));
    const auto own = rendezvous.address();
    store_->set(text(round, rank), std::vector<uint8_t>(own.begin(), own.end()));
    for (peer = 0; peer < ranks; ++peer) {
      const auto value = store_->get(text(round, peer));
      addresses[peer].assign(value.begin(), value.end());
    }
  } catch (const std::exception&) {
    refuse_call(kTimeout, "communicator ", name, ", rank ", rank, " of ", ranks, ": rank ", peer, " did not come within ",
        connect_timeout(), " s (HCCL_CONNECT_TIMEOUT), or rank 0 has ended; look at the output of these ranks");
  }
  links_ = rendezvous.connect(addresses, rank, hash(name + round), until);
}

Deadline Communicator::deadline() const { return exec_timeout_ ? Deadline(after(exec_timeout_)) : std::nullopt; }

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
  stop(result,
      text(call.describe(), " on communicator ", name, " (rank ", rank, " of ", ranks, ", call ", calls_, "): ", message));
  notify_failure(links_, this->message());
  throw Error(kOpFailed, this->message());
}

void Communicator::perform(const Header& call, const std::function<void()>& body) {
  std::lock_guard lock(mutex_);
  if (error_) throw Error(kOpFailed, text(call.describe(), ": the communicator failed earlier: ", message()));
  ++calls_;
  try {
    static const int delay = seconds("ASCEND_EMULATOR_HCCL_DELAY", 0, 0);
    if (delay) pause(Clock::now() + std::chrono::milliseconds(delay), wake_.get());
    switch (next_fault()) {
      case Fault::hang:
        pause(deadline(), wake_.get());
        throw TransferError(kTimeout, "it hung until HCCL_EXEC_TIMEOUT, as ASCEND_EMULATOR_HCCL_HANG asked");
      case Fault::drop:
        for (const auto& link : links_) {
          if (link.socket.get() >= 0) shutdown(link.socket.get(), SHUT_RDWR);
        }
        if (ranks > 1) throw TransferError(kRemote, "the connections broke, as ASCEND_EMULATOR_HCCL_DROP asked");
        break;
      case Fault::none: break;
    }
    body();
  } catch (const TransferError& send_failed) {
    fail(call, send_failed.result, send_failed.what());
  } catch (const Error& error) {  // possibly within a message
    fail(call, kSuspending, error.what());
  }
}

void Communicator::exchange(const Header& call, const std::vector<Part>& out, const std::vector<Part>& in) {
  std::vector<Outgoing> outgoing;
  std::vector<Incoming> incoming;
  for (int step = 1; step < ranks; ++step) {  // starting with the next rank
    const int peer = (rank + step) % ranks;
    outgoing.push_back({peer, call, out.empty() ? nullptr : out[peer].data});
    incoming.push_back({peer, call, in.empty() ? nullptr : in[peer].data});
    outgoing.back().header.bytes = out.empty() ? 0 : out[peer].bytes;
    incoming.back().header.bytes = in.empty() ? 0 : in[peer].bytes;
  }
  transfer(links_, outgoing, incoming, deadline(), wake_.get());
}

// Sends are synchronous: they complete when the receiver has made its call ("HcclSend"). So a receive sends its header.
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
        throw TransferError(kParameter, "a send to this rank itself and its receive have different sizes");
      std::memmove(sends ? other.data : item.data, sends ? item.data : other.data, item.header.bytes);
      to_self.pop_front();
      continue;
    }
    Header without = item.header;
    without.bytes = 0;
    Header with = item.header;
    with.kind = kSend;
    without.kind = kReceive;
    outgoing.push_back({item.peer, sends ? with : without, item.data});
    incoming.push_back({item.peer, sends ? without : with, item.data});
  }
  if (!to_self.empty())
    throw TransferError(
        kParameter, "a send to this rank itself, or a receive from it, is alone; they must be in one group or batch");
  transfer(links_, outgoing, incoming, deadline(), wake_.get());
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
