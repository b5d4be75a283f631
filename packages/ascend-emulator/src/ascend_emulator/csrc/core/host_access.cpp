// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "host_access.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>

#include "process.h"

namespace emu::host_access {
namespace {

constexpr uintptr_t kPage = 4096;
// Each may split the address space twice more; Linux allows 65530 parts (vm.max_map_count).
constexpr size_t kMostPending = 4096;
constexpr size_t kMostSites = 5;       // in the line at exit
constexpr size_t kMostOfTrace = 4000;  // bytes of a traceback that are read: the stack may be small

struct Pending {
  Range range;
  bool runs = false;    // the copy
  bool opened = false;  // to the host, after an access
  std::string site;     // that queued it
};

struct Watcher {
  std::mutex mutex;  // of the handler's installation
  std::atomic<const struct sigaction*> before{nullptr};
  std::atomic<uintptr_t> base{0}, end{0};  // of the device addresses
  Memory memory{};
  // Of Python, which has them exported in some versions; they write to a file and allocate nothing.
  void (*dump)(int, void*) = nullptr;
  const char* (*dump_all)(int, void*, void*) = nullptr;
  void* (*thread)() = nullptr;
  int file = -1;
};
Watcher& watcher() { return process.part<Watcher>(); }

struct Races {
  const char* const given = std::getenv("ASCEND_EMULATOR_RACES");
  const bool on = given && *given == '1';
  std::mutex mutex;
  std::list<Pending> pending;
  std::map<std::string, int> sites;
};
Races& state() { return process.part<Races>(); }

uintptr_t page_of(uintptr_t address) { return address & ~(kPage - 1); }
uintptr_t pages_end(const Range& range) { return page_of(range.first + range.bytes + kPage - 1); }

// Protects the pages as the pending copies need it. The mutex is locked.
void protect(uintptr_t first, uintptr_t end) {
  std::set<uintptr_t> borders{first, end};
  std::vector<const Pending*> here;
  for (const auto& each : state().pending) {
    const auto begin = page_of(each.range.first), stop = pages_end(each.range);
    if (begin >= end || stop <= first) continue;
    here.push_back(&each);
    borders.insert(std::max(begin, first));
    borders.insert(std::min(stop, end));
  }
  for (auto border = borders.begin(); std::next(border) != borders.end(); ++border) {
    int allowed = PROT_READ | PROT_WRITE;
    for (const auto* each : here) {
      if (page_of(each->range.first) > *border || pages_end(each->range) <= *border) continue;
      if (each->runs) {
        allowed = PROT_READ | PROT_WRITE;
        break;
      }
      if (!each->opened) allowed &= each->range.written ? PROT_NONE : PROT_READ;
    }
    mprotect(reinterpret_cast<void*>(*border), *std::next(border) - *border, allowed);
  }
}
void protect(const Range& range) { protect(page_of(range.first), pages_end(range)); }

// Writes a line to stderr as a whole.
void say(const std::string& line) {
  const auto whole = line + "\n";
  if (write(STDERR_FILENO, whole.data(), whole.size()) < 0) return;
}

bool is_library(std::string_view file) {
  const auto has = [&](const char* part) { return file.find(part) != std::string_view::npos; };
  return has("-packages/") ? has("-packages/torch") || has("-packages/numpy")
                           : has("/lib/python3") || file.starts_with("<frozen");
}

// The innermost line of Python that is not torch's, numpy's or Python's own: "file:line
// (function)", empty where there is none. A thread without Python, such as one of OpenMP's,
// computes for another one: that is taken to be the main thread.
std::string python_line(bool of_main_too) {
  auto& on = watcher();
  if (!on.thread || on.file < 0) return "";
  void* const thread = on.thread();
  if (!thread && (!of_main_too || !on.dump_all)) return "";
  if (ftruncate(on.file, 0) != 0 || lseek(on.file, 0, SEEK_SET) != 0) return "";
  if (thread) on.dump(on.file, thread);
  else on.dump_all(on.file, nullptr, nullptr);
  char text[kMostOfTrace];
  const off_t size = lseek(on.file, 0, SEEK_CUR);
  // The main thread is the last of all.
  const off_t from = thread ? 0 : std::max<off_t>(0, size - static_cast<off_t>(sizeof text));
  const ssize_t read = pread(on.file, text, sizeof text, from);
  std::string_view rest(text, std::max<ssize_t>(read, 0));
  if (!thread) {
    const auto last = rest.rfind("(most recent call first)");
    if (last != std::string_view::npos) rest.remove_prefix(last);
  }
  std::string innermost;
  for (size_t at; (at = rest.find("  File \"")) != std::string_view::npos;) {
    rest.remove_prefix(at + 8);
    const auto line = rest.substr(0, rest.find('\n'));
    const auto quote = line.find("\", line "), in = line.find(" in ", quote);
    if (quote == std::string_view::npos || in == std::string_view::npos) continue;
    auto file = line.substr(0, quote);
    const bool library = is_library(file);
    char here[1024];
    const size_t length = getcwd(here, sizeof here) ? std::strlen(here) : 0;
    if (length && file.substr(0, length) == here && file[length] == '/')
      file.remove_prefix(length + 1);
    std::string site(file);
    site.append(":").append(line.substr(quote + 8, in - quote - 8));
    site.append(" (").append(line.substr(in + 4)).append(")");
    if (!library) return site;
    if (innermost.empty()) innermost = site;
  }
  return innermost;
}

enum class Access { unknown, read, write };
Access access_of(const void* context) {
#if defined(__x86_64__)
  const auto& registers = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs;
  return registers[REG_ERR] & 2 ? Access::write : Access::read;
#else
  static_cast<void>(context);
  return Access::unknown;
#endif
}
const char* verb(Access access, const char* read, const char* write, const char* unknown) {
  return access == Access::read ? read : access == Access::write ? write : unknown;
}

// A fault in pinned memory: opens it to the host, and reports the race unless only a neighbour in
// the page was accessed. False if this is other memory.
bool open_pinned(uintptr_t address, Access access) {
  const auto locked = watcher().memory.page_locked;
  if (!locked || !locked(reinterpret_cast<void*>(address))) return false;
  if (process.forked())
    return mprotect(reinterpret_cast<void*>(page_of(address)), kPage, PROT_READ | PROT_WRITE) == 0;
  std::lock_guard lock(state().mutex);
  // None is left where another thread's fault opened the page.
  for (auto& each : state().pending) {
    const auto& range = each.range;
    if (each.opened || each.runs || page_of(address) < page_of(range.first) ||
        address >= pages_end(range))
      continue;
    each.opened = true;
    protect(range);
    if (address < range.first || address >= range.first + range.bytes) continue;
    auto site = python_line(true);
    if (site.empty()) site = "a line outside of Python";
    ++state().sites[site];
    say(text("ascend-emulator: race at ", site, ": the host ",
        verb(access, "read", "wrote", "accessed"), " byte ", address - range.first,
        " of pinned memory before a copy of ", range.bytes, " bytes ",
        range.written ? "from" : "to", " NPU ", range.npu, each.site.empty() ? "" : ", called at ",
        each.site, each.site.empty() ? "" : ",", range.written ? " had arrived" : " had read it",
        "; fix: wait for the copy first, by its stream or an event"));
  }
  return true;
}

// A fault in device memory, which ends the process.
void report_device(uintptr_t address, Access access) {
  const auto* at = reinterpret_cast<const void*>(address);
  const auto [start, bytes, npu] = watcher().memory.owner(at);
  const auto site = python_line(true);
  std::string where = "where nothing is allocated";
  if (bytes)
    where = text("byte ", address - start, " of an allocation of ", bytes, " bytes of NPU ", npu);
  say(text("ascend-emulator: the host ", verb(access, "reads", "writes", "accesses"), " NPU memory",
      site.empty() ? "" : " at ", site, ": address ", at, ", ", where,
      "; fix: copy it with tensor.cpu() or copy_(), or aclrtMemcpy"));
}

// Lets the signal end the process when the handler returns: an access is repeated, and a signal may
// be waiting; otherwise it is sent.
void end(int signal, bool repeated) {
  struct sigaction otherwise{};
  otherwise.sa_handler = SIG_DFL;
  sigaction(signal, &otherwise, nullptr);
  if (!repeated) ::raise(signal);
}

void handle(int signal, siginfo_t* info, void* context);
bool is_own(const struct sigaction& action) {
  return action.sa_flags & SA_SIGINFO && action.sa_sigaction == handle;
}

void handle(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  auto& on = watcher();
  const bool fault = info->si_code > 0;  // of an access, not of kill() or raise()
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  const bool on_device = fault && address >= on.base && address < on.end;
  if (fault && !on_device && state().on && open_pinned(address, access_of(context))) {
    errno = error;
    return;
  }
  if (on_device) report_device(address, access_of(context));
  const auto* before = on.before.load();
  errno = error;
  if (before->sa_flags & SA_SIGINFO) before->sa_sigaction(signal, info, context);
  else if (before->sa_handler != SIG_DFL && before->sa_handler != SIG_IGN)
    before->sa_handler(signal);
  else return end(signal, fault);
  // It may have restored the handler before it, which is this one, and sent the signal again, as
  // Python's faulthandler does to end the process.
  sigset_t pending;
  sigpending(&pending);
  struct sigaction now{};
  sigaction(signal, nullptr, &now);
  if (sigismember(&pending, signal) && is_own(now)) end(signal, true);
}

template <class Function> void find(Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// At exit, where a test's output may have been captured.
__attribute__((destructor)) void report() {
  if (process.forked() || state().sites.empty()) return;
  std::vector<std::string> shown;
  for (const auto& [site, count] : state().sites)
    if (shown.size() < kMostSites) shown.push_back(text(count, " at ", site));
  if (state().sites.size() > shown.size())
    shown.push_back(text(state().sites.size() - shown.size(), " other lines"));
  say(text("ascend-emulator: races: ", listed(shown)));
}

}  // namespace

void reserved(uintptr_t base, uint64_t bytes, const Memory& memory) {
  watcher().memory = memory;
  watcher().base = base;
  watcher().end = base + bytes;
  watch();
}

void watch() {
  struct sigaction now{};
  if (sigaction(SIGSEGV, nullptr, &now) != 0) return;
  if (is_own(now)) return;
  auto& on = watcher();
  std::lock_guard lock(on.mutex);
  if (on.file < 0) {
    on.file = memfd_create("ascend-emulator-traceback", MFD_CLOEXEC);
    find(on.dump, "_Py_DumpTraceback");
    find(on.dump_all, "_Py_DumpTracebackThreads");
    if (on.dump) find(on.thread, "PyGILState_GetThisThreadState");
  }
  state();                                // The handler allocates nothing.
  on.before = new struct sigaction(now);  // kept: the handler may be running
  struct sigaction own{};
  own.sa_sigaction = handle;
  own.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &own, nullptr);
}

bool races() { return state().on; }

Guard::Guard(const Range& range) {
  watch();
  std::lock_guard lock(state().mutex);
  if (state().pending.size() >= kMostPending) return;
  pending_ = &state().pending.emplace_front(Pending{range, false, false, python_line(false)});
  protect(range);
}

void Guard::begin() {
  std::lock_guard lock(state().mutex);
  for (auto& each : state().pending) {
    if (&each != pending_) continue;
    each.runs = true;
    protect(each.range);
  }
}

Guard::~Guard() {
  std::lock_guard lock(state().mutex);
  const auto own = std::find_if(state().pending.begin(), state().pending.end(),
      [&](const Pending& each) { return &each == pending_; });
  if (own == state().pending.end()) return;
  const auto range = own->range;
  state().pending.erase(own);
  protect(range);
}

Guards guards(const std::vector<Range>& ranges) {
  Guards made;
  for (const auto& range : ranges) made.push_back(std::make_shared<Guard>(range));
  return made;
}

void forget(uintptr_t first, uint64_t bytes) {
  if (!state().on) return;
  std::lock_guard lock(state().mutex);
  state().pending.remove_if([&](const Pending& each) {
    return each.range.first >= first && each.range.first < first + bytes;
  });
  protect(page_of(first), page_of(first + bytes + kPage - 1));
}

}  // namespace emu::host_access
