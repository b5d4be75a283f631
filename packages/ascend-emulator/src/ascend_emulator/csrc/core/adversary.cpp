#include "adversary.h"

#include <cstdlib>
#include <list>
#include <set>

namespace emu {
namespace {

constexpr auto kQuiet = std::chrono::milliseconds(200);  // without any call, what nobody demands runs

struct Wanted {
  Stream* stream;
  uint64_t ticket;
};

struct State {
  std::mutex mutex;
  std::condition_variable granted;
  uint64_t seed = 0;
  std::vector<std::weak_ptr<Stream>> streams;  // in order of creation
  std::list<Wanted> demands;
  std::set<const Stream*> busy;  // whose head runs
  const Stream* turn = nullptr;  // whose head may run now
  bool quiet = false;            // nobody called for a while: all may run
  Clock::time_point last_call = Clock::now();
  void called() {
    last_call = Clock::now();
    quiet = false;
  }
};

State* state() {
  static State* const instance = [] {
    const char* seed = std::getenv("ASCEND_EMULATOR_ADVERSARY");
    if (!seed || !*seed) return static_cast<State*>(nullptr);
    auto* made = new State;
    made->seed = std::strtoull(seed, nullptr, 10);
    return made;
  }();
  return instance;
}

// A number that follows from the seed and what it is for (splitmix64). Nothing is drawn from a sequence: two threads that ask in
// another order would change what follows.
uint64_t hash(uint64_t seed, std::initializer_list<uint64_t> parts) {
  for (uint64_t part : parts) {
    seed += 0x9e3779b97f4a7c15 + part;
    seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9;
    seed = (seed ^ (seed >> 27)) * 0x94d049bb133111eb;
    seed ^= seed >> 31;
  }
  return seed;
}

bool stuck(const Head& head) { return head.waits_for && !head.waits_for->stream->reached(head.waits_for->ticket); }

void need(Stream& stream, std::set<const Stream*>& into) {
  if (!into.insert(&stream).second) return;
  const auto head = Adversary::head(stream);
  if (stuck(head)) need(*head.waits_for->stream, into);
}

// Gives the next turn, if nobody has it and there is a reason to.
void pick(State& s) {
  if (s.turn || (s.demands.empty() && !s.quiet)) return;
  std::vector<std::shared_ptr<Stream>> living;
  for (const auto& weak : s.streams)
    if (auto stream = weak.lock()) living.push_back(stream);
  std::set<const Stream*> needed;
  for (const auto& demand : s.demands)
    if (hash(s.seed, {static_cast<uint64_t>(demand.stream->id), demand.ticket}) % 2) need(*demand.stream, needed);
  const Stream* best = nullptr;
  uint64_t best_rank = 0;
  for (const auto& stream : living) {
    const auto head = Adversary::head(*stream);
    if (!head.any || s.busy.count(stream.get()) || stuck(head) || (!needed.empty() && !needed.count(stream.get()))) continue;
    const auto rank = hash(s.seed, {static_cast<uint64_t>(stream->id), stream->completed() / 8});
    if (best && rank <= best_rank) continue;
    best = stream.get();
    best_rank = rank;
  }
  if (!best) return;
  s.turn = best;
  s.granted.notify_all();
}

}  // namespace

// Lock order: the state's, then a stream's.
Head Adversary::head(Stream& stream) {
  std::lock_guard own(stream.mutex_);
  if (stream.tasks_.empty()) return {};
  return {true, stream.tasks_.front().waits_for};
}

bool Adversary::on() { return state() != nullptr; }

void Adversary::join(const std::shared_ptr<Stream>& stream) {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  if (s->streams.empty()) {
    std::thread([s] {
      for (;;) {
        std::this_thread::sleep_for(kQuiet / 4);
        std::lock_guard lock(s->mutex);
        if (s->turn || Clock::now() - s->last_call < kQuiet) continue;
        s->quiet = true;
        pick(*s);
      }
    }).detach();
  }
  s->streams.push_back(stream);
}

void Adversary::submitted() {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  s->called();
  pick(*s);
}

void Adversary::completed(Stream& stream) {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  s->busy.erase(&stream);
  pick(*s);
}

uint64_t Adversary::number(std::initializer_list<uint64_t> parts) { return state() ? hash(state()->seed, parts) : 0; }

Adversary::Demand::Demand(Stream& stream, uint64_t ticket) {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  s->called();
  own_ = &s->demands.emplace_front(Wanted{&stream, ticket});
  pick(*s);
}

Adversary::Demand::~Demand() {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  s->called();
  s->demands.remove_if([&](const Wanted& each) { return &each == own_; });
}

Adversary::Turn::Turn(Stream& stream, const Task& task) {
  auto* s = state();
  if (!s) return;
  std::unique_lock lock(s->mutex);
  s->granted.wait(lock, [&] { return s->turn == &stream; });
  s->busy.insert(&stream);
  held_ = !task.blocks;
  if (task.blocks) s->turn = nullptr;  // others may go on while it waits for the world outside
}

Adversary::Turn::~Turn() {
  if (!held_) return;
  auto* s = state();
  std::lock_guard lock(s->mutex);
  s->turn = nullptr;
}

}  // namespace emu
