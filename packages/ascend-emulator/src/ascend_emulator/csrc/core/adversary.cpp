// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "adversary.h"

#include <cstdlib>
#include <list>
#include <set>

namespace emu {
namespace {

constexpr auto kIdleTime =
    std::chrono::milliseconds(200);  // without any call, after which everything may run

struct DemandedTicket {
  Stream* stream;
  uint64_t ticket;
};

struct State {
  std::mutex mutex;
  std::condition_variable granted;
  uint64_t seed = 0;
  std::vector<std::weak_ptr<Stream>> streams;  // in order of creation
  std::list<DemandedTicket> demands;
  std::set<const Stream*> busy;  // streams whose head is running
  const Stream* turn = nullptr;  // stream whose head may run now
  bool idle = false;             // no call for kIdleTime: everything may run
  Clock::time_point last_call = Clock::now();
  void note_call() {
    last_call = Clock::now();
    idle = false;
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

// Hash of the seed and the purpose (splitmix64). There is no random sequence, because its order
// would depend on thread timing.
uint64_t hash(uint64_t seed, std::initializer_list<uint64_t> parts) {
  for (uint64_t part : parts) {
    seed += 0x9e3779b97f4a7c15 + part;
    seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9;
    seed = (seed ^ (seed >> 27)) * 0x94d049bb133111eb;
    seed ^= seed >> 31;
  }
  return seed;
}

bool blocked(const Head& head) {
  return head.waits_for && !head.waits_for->stream->reached(head.waits_for->ticket);
}

void add_dependencies(Stream& stream, std::set<const Stream*>& into) {
  if (!into.insert(&stream).second) return;
  const auto head = Adversary::head(stream);
  if (blocked(head)) add_dependencies(*head.waits_for->stream, into);
}

// Chooses the next stream to run, unless one is running or nothing is demanded.
void schedule_next(State& s) {
  if (s.turn || (s.demands.empty() && !s.idle)) return;
  std::vector<std::shared_ptr<Stream>> living;
  for (const auto& weak : s.streams)
    if (auto stream = weak.lock()) living.push_back(stream);
  std::set<const Stream*> needed;
  for (const auto& demand : s.demands)
    if (hash(s.seed, {static_cast<uint64_t>(demand.stream->id), demand.ticket}) % 2)
      add_dependencies(*demand.stream, needed);
  const Stream* best = nullptr;
  uint64_t best_rank = 0;
  for (const auto& stream : living) {
    const auto head = Adversary::head(*stream);
    if (!head.any || s.busy.count(stream.get()) || blocked(head) ||
        (!needed.empty() && !needed.count(stream.get())))
      continue;
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
        std::this_thread::sleep_for(kIdleTime / 4);
        std::lock_guard lock(s->mutex);
        if (s->turn || Clock::now() - s->last_call < kIdleTime) continue;
        s->idle = true;
        schedule_next(*s);
      }
    }).detach();
  }
  s->streams.push_back(stream);
}

void Adversary::submitted() {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  s->note_call();
  schedule_next(*s);
}

void Adversary::completed(Stream& stream) {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  s->busy.erase(&stream);
  schedule_next(*s);
}

void Adversary::dropped(Stream& stream) {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  if (s->turn == &stream && !s->busy.count(&stream)) s->turn = nullptr;
  schedule_next(*s);
}

uint64_t Adversary::number(std::initializer_list<uint64_t> parts) {
  return state() ? hash(state()->seed, parts) : 0;
}

Adversary::Demand::Demand(Stream& stream, uint64_t ticket) {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  s->note_call();
  own_ = &s->demands.emplace_front(DemandedTicket{&stream, ticket});
  schedule_next(*s);
}

Adversary::Demand::~Demand() {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  s->note_call();
  s->demands.remove_if([&](const DemandedTicket& each) { return &each == own_; });
}

Adversary::Turn::Turn(Stream& stream, const Task& task) {
  auto* s = state();
  if (!s) return;
  std::unique_lock lock(s->mutex);
  s->granted.wait(lock, [&] { return s->turn == &stream; });
  s->busy.insert(&stream);
  held_ = !task.blocks;
  if (task.blocks) s->turn = nullptr;  // others may run while it waits for other processes
}

Adversary::Turn::~Turn() {
  if (!held_) return;
  auto* s = state();
  std::lock_guard lock(s->mutex);
  s->turn = nullptr;
}

}  // namespace emu
