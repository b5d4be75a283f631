// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "adversary.h"

#include <cstdlib>
#include <condition_variable>
#include <list>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "hash.h"
#include "process.h"

namespace emu {
namespace {

// Everything may run after 200 ms without any call, of which a process that does not run at all is
// one tick.
constexpr auto kTick = std::chrono::milliseconds(50);
constexpr int kIdleTicks = 4;

struct DemandedTicket {
  Queue* stream;
  uint64_t ticket;
};

struct State {
  std::mutex mutex;
  std::condition_variable granted;
  const char* const given = std::getenv("ASCEND_EMULATOR_ADVERSARY");
  const bool on = given && *given;
  const uint64_t seed = on ? std::strtoull(given, nullptr, 10) : 0;
  std::vector<std::weak_ptr<Queue>> streams;  // in order of creation
  std::list<DemandedTicket> demands;
  std::set<const Queue*> busy;  // streams whose head is running
  const Queue* turn = nullptr;  // stream whose head may run now
  bool idle = false;            // no call for kIdleTicks: everything may run
  int ticks = 0;                // since the last call
  void note_call() {
    ticks = 0;
    idle = false;
  }
};

// Null without an adversary.
State* state() {
  auto& instance = process.part<State>();
  return instance.on ? &instance : nullptr;
}

void add_dependencies(Queue& stream, std::set<const Queue*>& into) {
  if (!into.insert(&stream).second) return;
  if (const auto other = stream.head().blocked_by) add_dependencies(*other, into);
}

// Chooses the next stream to run, unless one is running or nothing is demanded.
void schedule_next(State& s) {
  if (s.turn || (s.demands.empty() && !s.idle)) return;
  std::vector<std::shared_ptr<Queue>> living;
  for (const auto& weak : s.streams)
    if (auto stream = weak.lock()) living.push_back(stream);
  std::set<const Queue*> needed;
  for (const auto& demand : s.demands)
    if (hash(s.seed, {static_cast<uint64_t>(demand.stream->id), demand.ticket}) % 2)
      add_dependencies(*demand.stream, needed);
  const Queue* best = nullptr;
  uint64_t best_rank = 0;
  for (const auto& stream : living) {
    const auto head = stream->head();
    if (!head.any || s.busy.count(stream.get()) || head.blocked_by ||
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
bool Adversary::on() { return state() != nullptr; }

void Adversary::join(const std::shared_ptr<Queue>& stream) {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  if (s->streams.empty()) {
    std::thread([s] {
      for (;;) {
        std::this_thread::sleep_for(kTick);
        std::lock_guard lock(s->mutex);
        if (++s->ticks < kIdleTicks || s->turn) continue;
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

void Adversary::completed(Queue& stream) {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  s->busy.erase(&stream);
  schedule_next(*s);
}

void Adversary::dropped(Queue& stream) {
  auto* s = state();
  if (!s) return;
  std::lock_guard lock(s->mutex);
  if (s->turn == &stream && !s->busy.count(&stream)) s->turn = nullptr;
  schedule_next(*s);
}

uint64_t Adversary::number(std::initializer_list<uint64_t> parts) {
  return state() ? hash(state()->seed, parts) : 0;
}

Adversary::Demand::Demand(Queue& stream, uint64_t ticket) {
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

Adversary::Turn::Turn(Queue& stream, bool blocks) {
  auto* s = state();
  if (!s) return;
  std::unique_lock lock(s->mutex);
  s->granted.wait(lock, [&] { return s->turn == &stream; });
  s->busy.insert(&stream);
  held_ = !blocks;
  if (blocks) s->turn = nullptr;  // others may run while it waits for other processes
}

Adversary::Turn::~Turn() {
  if (!held_) return;
  auto* s = state();
  std::lock_guard lock(s->mutex);
  s->turn = nullptr;
}

}  // namespace emu
