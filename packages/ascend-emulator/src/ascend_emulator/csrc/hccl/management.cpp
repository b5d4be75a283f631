// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// Entry points that create, query and destroy communicators. Signatures: see types.h.
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "core/device.h"
#include "api.h"
#include "ranktable.h"

using namespace emu;
using namespace emu::hccl;

namespace emu::hccl {
namespace {

struct Communicators {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Communicator>> living;
  std::map<std::pair<std::string, uint32_t>, int> of_tables;  // uses by table and rank
  std::map<std::pair<int, std::string>, std::weak_ptr<Buffers>> named_buffers;  // by NPU
  std::atomic<int> roots{0}, in_process{0};                                     // numbers for names
  // Rank 0's stores for the communicators of rank tables, by port. Never destroyed: a rank that
  // already makes its next communicator may be connected to it while this one destroys the last.
  std::map<int, c10::intrusive_ptr<c10d::Store>> table_stores;
  std::mutex stores_mutex, buffers_mutex;
};
Communicators& communicators() { return process.part<Communicators>(); }

c10::intrusive_ptr<c10d::Store> prefixed(
    const std::string& prefix, c10::intrusive_ptr<c10d::Store> store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
}

c10d::TCPStoreOptions store_options(int port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = std::chrono::seconds(connect_timeout());
  return options;
}

c10::intrusive_ptr<c10d::TCPStore> store_of_rank_0(const std::string& ip, int port) {
  try {
    return c10::make_intrusive<c10d::TCPStore>(ip, store_options(port));
  } catch (const std::exception& error) {
    refuse_call(kTimeout, "rank 0 does not answer at ", ip, " port ", port, " within ",
        connect_timeout(),
        " s (HCCL_CONNECT_TIMEOUT); is it running, and reachable from this machine?");
  }
}

// A store that listens at one address only; TCPStore by itself would listen at all of this
// machine's.
c10::intrusive_ptr<c10d::TCPStore> serving_store(const std::string& ip, int port, const char* fix) {
  try {
    auto [socket, actual] = bound(ip, port);
    auto options = store_options(actual);
    options.isServer = true;
    options.masterListenFd = socket.release();
    return c10::make_intrusive<c10d::TCPStore>(ip, options);
  } catch (const std::exception& error) {
    refuse_call(kConnect, std::string(error_of(error).what()).substr(0, 160), "; fix: ", fix);
  }
}

// Store for the communicators whose root is in this process.
c10d::TCPStore& root_store() {
  // Never destroyed: ranks may connect during exit.
  struct RootStore {
    const c10::intrusive_ptr<c10d::TCPStore> store =
        serving_store(root_ip(), 0, "set HCCL_IF_IP to an address of this machine");
  };
  return *process.part<RootStore>().store;
}

c10::intrusive_ptr<c10d::Store> table_store(const std::string& ip, int port) {
  std::lock_guard lock(communicators().stores_mutex);
  auto& store = communicators().table_stores[port];
  if (!store)
    store = serving_store(ip, port,
        "set HCCL_IF_BASE_PORT to a free port, and the server's host_ip to an address of this "
        "machine");
  return store;
}

// HcclRootInfo: mark, address and port of the root's store, identifier, secret, and the root's
// machine, separated by spaces. Only ranks may know it: torch_npu passes it on through the process
// group's store.
constexpr char kMark[] = "ascend-emulator-hccl-2";

std::string config_name(const Config* config, const std::string& otherwise) {
  const bool named = config && config->size > offsetof(Config, name) && config->name[0];
  return named ? std::string(config->name, strnlen(config->name, sizeof config->name - 1))
               : otherwise;
}

constexpr uint32_t kUnset = 0xffffffff;

// Communicators of a process with the same "hcclBufferName" use one buffer (torch_npu's
// hccl_buffer_name).
std::shared_ptr<Buffers> buffers_of(
    const Config* config, const std::string& name, int ranks, uint64_t size) {
  const auto made = [&] { return std::make_shared<Buffers>(name, ranks, size); };
  if (!config || config->size < offsetof(Config, buffer_name) + sizeof config->buffer_name)
    return made();
  const std::string shared(
      config->buffer_name, strnlen(config->buffer_name, sizeof config->buffer_name));
  if (shared.empty() || ranks == 1) return made();
  std::lock_guard lock(communicators().buffers_mutex);
  auto& place = communicators().named_buffers[{current_device(), shared}];
  auto buffers = place.lock();
  if (!buffers) place = buffers = made();
  return buffers;
}

Options options_of(const Config* config, const std::string& name, int ranks, const Secret& secret) {
  Options options{exec_timeout(), buffer_size(), on_vector_cores(), secret};
  // hcclOpExpansionMode: 0 as the variable says, 3 AIV, 4 AIV or an error.
  if (config && config->size > offsetof(Config, expansion_mode) && config->expansion_mode &&
      config->expansion_mode != kUnset)
    options.on_vector_cores = config->expansion_mode >= 3;
  if (config && config->size > offsetof(Config, exec_timeout) && config->exec_timeout != -1)
    options.exec_timeout = config->exec_timeout;
  if (config && config->size > offsetof(Config, buffer_size) && config->buffer_size != kUnset) {
    // "取值需 >= 1,默认值为:200" ("HcclCommConfig").
    if (!config->buffer_size) refuse_call(kParameter, "hcclBufferSize is 0; allowed: from 1 (MiB)");
    options.buffer_size = config->buffer_size;
  }
  options.buffers = buffers_of(config, name, ranks, options.buffer_size);
  return options;
}

bool is_word(std::string_view text, const char* besides = "") {
  return !text.empty() && std::all_of(text.begin(), text.end(), [&](unsigned char c) {
    return std::isalnum(c) || c == '_' || std::strchr(besides, c);
  });
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

// Operations separated by "/"; each has an optional "name=" and levels separated by ";".
bool is_algorithm(const std::string& text) {
  for (std::string levels : split(text, '/')) {
    if (const auto equals = levels.find('='); equals != std::string::npos) {
      if (!is_word(levels.substr(0, equals))) return false;
      levels = levels.substr(equals + 1);
    }
    for (const auto& level : split(levels, ';'))
      if (level.rfind("level", 0) != 0 || level.size() < 8 ||
          !std::isdigit(static_cast<unsigned char>(level[5])) || level[6] != ':' ||
          !is_word(level.substr(7), "-"))
        return false;
  }
  return true;
}

// "level0:NA;level1:ring", or per operation "allreduce=level0:NA;level1:ring/allgather=…"
// (HCCL_ALGO). It does not affect results.
void check_algorithm(const Config* config) {
  if (!config || config->size < offsetof(Config, algorithm) + sizeof config->algorithm) return;
  const std::string chosen(config->algorithm, strnlen(config->algorithm, sizeof config->algorithm));
  if (!chosen.empty() && (chosen.size() > 400 || !is_algorithm(chosen))) {
    refuse_call(kParameter, "hcclAlgo is ", chosen.substr(0, 60),
        "; it has the form level0:NA;level1:ring, or operation=level0:NA;level1:ring/…");
  }
}

std::shared_ptr<Communicator> from_root(
    uint32_t ranks, const char* root, uint32_t rank, const Config* config) {
  if (!root) refuse_call(kNullPointer, "rootInfo is null");
  check_algorithm(config);
  if (ranks == 0 || rank >= ranks)
    refuse_call(kParameter, "rank is ", rank, " of ", ranks, "; allowed: 0 to nRanks - 1");
  std::stringstream parts(std::string(root, strnlen(root, 512)));
  std::string mark, ip, id, secret, host;
  int port = 0;
  parts >> mark >> ip >> port >> id >> secret >> host;
  if (mark != kMark || host.empty())
    refuse_call(kParameter, "rootInfo does not come from HcclGetRootInfo of an emulated HCCL");
  if (ranks > 1 && ip.starts_with("127.") && host != machine())
    refuse_call(kConnect, "the root listens at ", ip,
        ", and this rank is on another machine or in another network namespace; ",
        "fix: set HCCL_IF_IP on each machine to its own address");
  const auto name = config_name(config, "hccl_" + id);
  auto options = options_of(config, name, static_cast<int>(ranks), Secret(secret));
  auto store = ranks == 1 ? c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::HashStore>())
                          : c10::intrusive_ptr<c10d::Store>(store_of_rank_0(ip, port));
  return std::make_shared<Communicator>(prefixed(id, store), name, static_cast<int>(rank),
      static_cast<int>(ranks), std::move(options));
}

std::shared_ptr<Communicator> from_table(const char* path, uint32_t rank, const Config* config) {
  if (!path) refuse_call(kNullPointer, "clusterInfo is null");
  check_algorithm(config);
  const auto table = read_rank_table(path);
  const int ranks = static_cast<int>(table.servers.size());
  if (static_cast<int64_t>(rank) >= ranks)
    refuse_call(kParameter, "rank is ", rank, "; ", path, " has ", ranks, " ranks");
  const char* base = std::getenv("HCCL_IF_BASE_PORT");
  const int port = base && *base ? std::atoi(base) : 60000;  // the documented default
  int use;                                                   // equal on all ranks
  {
    std::lock_guard lock(communicators().mutex);
    use = communicators().of_tables[{table.identity, rank}]++;
  }
  const std::string prefix = text("hccl_table_", table.identity, "_", use),
                    name = config_name(config, prefix);
  auto options = options_of(config, name, ranks, table.secret.derived(prefix));
  const auto& servers = table.servers;
  const bool one = std::all_of(
      servers.begin(), servers.end(), [&](const auto& each) { return each == servers[0]; });
  const std::string ip = one ? "127.0.0.1" : servers[0];
  auto store = ranks == 1  ? c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::HashStore>())
               : rank == 0 ? table_store(ip, port)
                           : c10::intrusive_ptr<c10d::Store>(store_of_rank_0(ip, port));
  return std::make_shared<Communicator>(
      prefixed(prefix, store), name, static_cast<int>(rank), ranks, std::move(options));
}

void result(void** comm, std::shared_ptr<Communicator> made) {
  *comm = made.get();
  std::lock_guard lock(communicators().mutex);
  communicators().living[*comm] = std::move(made);
}

void place(void** comm) {
  if (!comm) refuse_call(kNullPointer, "comm is null");
}

}  // namespace

std::shared_ptr<Communicator> communicator(void* handle) {
  if (!handle) refuse_call(kNullPointer, "comm is null");
  std::lock_guard lock(communicators().mutex);
  const auto found = communicators().living.find(handle);
  if (found == communicators().living.end())
    refuse_call(kParameter, handle, " is no communicator, or it was destroyed");
  return found->second;
}

std::shared_ptr<Communicator> named(const char* argument, const std::string& name) {
  const int npu = current_device();
  std::lock_guard lock(communicators().mutex);
  for (const auto& [handle, each] : communicators().living) {
    if (each->name.substr(0, 127) == name && each->device == npu) return each;
  }
  raise(kOpParam, {argument, " is \"", name, "\"; NPU ", npu,
                      " has no communicator of this name in this process"});
}

}  // namespace emu::hccl

HCCL_API(computed, HcclGetRootInfo, (char* root), {
  if (!root) refuse_call(kNullPointer, "rootInfo is null");
  static const uint64_t process =
      std::random_device{}() * 0x100000001ull ^ static_cast<uint64_t>(getpid());
  const auto line = text(kMark, " ", root_store().getHost(), " ", root_store().getPort(), " ",
      hex(process), "_", communicators().roots++, " ", Secret::random().key(), " ", machine());
  std::strcpy(root, line.c_str());
})

HCCL_API(computed, HcclCommInitRootInfo,
    (uint32_t ranks, const char* root, uint32_t rank, void** comm), {
      place(comm);
      result(comm, from_root(ranks, root, rank, nullptr));
    })
HCCL_API(computed, HcclCommInitRootInfoConfig,
    (uint32_t ranks, const char* root, uint32_t rank, const Config* config, void** comm), {
      place(comm);
      if (!config) refuse_call(kNullPointer, "config is null");
      result(comm, from_root(ranks, root, rank, config));
    })
HCCL_API(computed, HcclCommInitClusterInfo, (const char* path, uint32_t rank, void** comm), {
  place(comm);
  result(comm, from_table(path, rank, nullptr));
})
HCCL_API(computed, HcclCommInitClusterInfoConfig,
    (const char* path, uint32_t rank, const Config* config, void** comm), {
      place(comm);
      if (!config) refuse_call(kNullPointer, "config is null");
      result(comm, from_table(path, rank, config));
    })

// Ranks that are not members pass null and get null.
HCCL_API(computed, HcclCreateSubCommConfig,
    (void** comm, uint32_t number, const uint32_t* members, uint64_t id, uint32_t rank,
        const Config* config, void** sub),
    {
      if (!comm) refuse_call(kNullPointer, "comm is null");
      place(sub);
      const auto whole = communicator(*comm);
      *sub = nullptr;
      if (!members) {
        if (id != 0xffffffff)
          refuse_call(kNullPointer,
              "rankIds is null; a rank that takes no part passes subCommId 0xFFFFFFFF too");
        return;
      }
      if (!config) refuse_call(kNullPointer, "config is null");
      if (rank >= number)
        refuse_call(kParameter, "subCommRankId is ", rank, " of ", number, " ranks");
      for (uint32_t i = 0; i < number; ++i) {
        rank_within(text("rankIds[", i, "]"), members[i], *whole);
        if (i && members[i] <= members[i - 1])
          refuse_call(kParameter, "rankIds must ascend; rankIds[", i, "] is ", members[i],
              " after ", members[i - 1]);
      }
      if (static_cast<int>(members[rank]) != whole->rank) {
        refuse_call(kParameter, "rankIds[", rank, "] is ", members[rank], ", this rank is ",
            whole->rank, "; subCommRankId is its index in rankIds");
      }
      std::string prefix = text("sub/", id);
      for (uint32_t i = 0; i < number; ++i) prefix += text("/", members[i]);
      const auto name = config_name(config, text(whole->name, "_sub_", id));
      prefix += text("/", name);
      prefix += text("/", whole->next_use(prefix));
      const auto secret = whole->options.secret.derived(prefix);
      result(sub, std::make_shared<Communicator>(prefixed(prefix, whole->store()), name,
                      static_cast<int>(rank), static_cast<int>(number),
                      options_of(config, name, static_cast<int>(number), secret)));
    })

// All ranks in this process, one per NPU.
HCCL_API(computed, HcclCommInitAll, (uint32_t number, const int32_t* devices, void** comms), {
  place(comms);
  if (!devices) refuse_call(kNullPointer, "devices is null");
  if (!number) refuse_call(kParameter, "ndev is 0");
  for (uint32_t i = 0; i < number; ++i) {
    device(devices[i]);
    if (const auto* other = std::find(devices, devices + i, devices[i]); other != devices + i)
      refuse_call(kParameter, "devices[", other - devices, "] and devices[", i, "] are both ",
          devices[i], "; each rank has an NPU of its own");
  }
  const auto name = text("hccl_all_", getpid(), "_", communicators().in_process++);
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::shared_ptr<Communicator>> made(number);
  const auto secret = Secret::random();
  std::mutex first_mutex;
  std::string first;  // failure
  std::vector<std::jthread> threads;
  for (uint32_t i = 0; i < number; ++i) {
    threads.emplace_back([&, i] {
      try {
        set_current_device(devices[i]);
        made[i] = std::make_shared<Communicator>(store, name, static_cast<int>(i),
            static_cast<int>(number), options_of(nullptr, name, static_cast<int>(number), secret));
      } catch (const std::exception& error) {
        {
          std::lock_guard lock(first_mutex);
          if (first.empty()) first = error_of(error).what();
        }
        store->set(text("0/", i), std::vector<uint8_t>{});  // so that the others do not wait for it
      }
    });
  }
  threads.clear();  // joins them
  if (!first.empty()) refuse_call(kParameter, first);
  for (uint32_t i = 0; i < number; ++i) result(comms + i, made[i]);
})

HCCL_API(computed, HcclCommDestroy, (void* comm), {
  const auto it = communicator(comm);
  {
    std::lock_guard lock(communicators().mutex);
    communicators().living.erase(comm);
  }
  forget_memory(comm);
  it->close();
})

HCCL_API(computed, HcclGetRankSize, (void* comm, uint32_t* ranks),
    { *ranks = communicator(comm)->ranks; })
HCCL_API(
    computed, HcclGetRankId, (void* comm, uint32_t* rank), { *rank = communicator(comm)->rank; })
HCCL_API(computed, HcclGetCommName, (void* comm, char* name), {
  const auto it = communicator(comm);
  std::strcpy(name, it->name.substr(0, 127).c_str());
})

// Error of the first failed operation; its message becomes this thread's recent message, which
// torch_npu's watchdog reports.
HCCL_API(computed, HcclGetCommAsyncError, (void* comm, int32_t* error), {
  const auto it = communicator(comm);
  *error = it->error();
  if (*error) fail(static_cast<Status>(*error), it->message());
})
ACL_VALUE(const char*, answers, HcclGetErrorString, (int32_t result),
    { return emu::hccl::describe(result); })

HCCL_API(computed, HcclCommSuspend, (void* comm), { communicator(comm)->suspend(); })
HCCL_API(computed, HcclCommResume, (void* comm), { communicator(comm)->resume(); })

// Number of supported values of HcclCommConfigCapability: up to the name of a shared buffer.
ACL_VALUE(uint32_t, answers, HcclGetCommConfigCapability, (), { return 12; })

// HcclConfig 0: deterministic reductions, which is always the case.
HCCL_API(nothing("reductions are deterministic in any case"), HcclSetConfig,
    (int32_t config, int64_t),
    { check_emulated(config == 0, kInvalidParam, "configuration ", config, " is not emulated"); })

// Two ranks have only one connection.
HCCL_API(nothing("two ranks have one connection"), HcclCommWorkingDevNicSet,
    (void* comm, const uint32_t* ranks, const bool* backup, uint32_t number), {
      const auto it = communicator(comm);
      if (number && (!ranks || !backup)) refuse_call(kNullPointer, "ranks or useBackup is null");
      for (uint32_t i = 0; i < number; ++i) rank_within(text("ranks[", i, "]"), ranks[i], *it);
    })
