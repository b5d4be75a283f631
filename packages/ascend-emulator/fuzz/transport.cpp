// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
// libFuzzer target for what arrives over HCCL's connections: a peer sends the input to a rank that
// makes one to three calls, then closes. How to build and run it: docs/development.md.
#include "hccl/transport.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cstring>

#include "core/device.h"
#include "core/registry.h"

// What the transport needs of the rest of the library.
namespace emu {
void check_not_aborted() {}
void note(const char*) {}
bool has_current_device() { return false; }
int current_device() { return 0; }
Registration::Registration(const char*, Effect, const char*) {}
const Chip& chip() {
  static const Chip instance;
  return instance;
}
}  // namespace emu

using namespace emu::hccl;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  // The first bytes choose the calls, whether the peer reads, and the payloads; the rest is what
  // the peer sends.
  const uint8_t calls = 1 + data[0] % 3, kinds = data[1], deaf = data[2] & 1;
  const uint64_t bytes = data[3];
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) abort();
  std::vector<Link> links(2);
  links[1].socket = File(ends[0]);
  File peer(ends[1]);
  size_t sent = 4;
  while (sent < size) {  // what does not fit into the socket's buffer is left out
    const auto part = send(peer.get(), data + sent, size - sent, MSG_NOSIGNAL);
    if (part <= 0) break;
    sent += part;
  }
  shutdown(peer.get(), SHUT_WR);
  if (deaf) shutdown(peer.get(), SHUT_RD);
  const File wake(eventfd(0, EFD_CLOEXEC));
  std::vector<char> out(256), in(256);
  try {
    for (uint8_t call = 0; call < calls; ++call) {
      Header header;
      const uint8_t kind = kinds >> (2 * call) & 3;  // a collective, a send, a receive, both
      header.kind = kind == 0 ? kAllReduce : kSend;
      header.count = header.bytes = bytes;
      header.overtaken = call;
      Header asked = header;
      asked.kind = kReceive;
      asked.bytes = 0;
      std::vector<Outgoing> outgoing;
      std::vector<Incoming> incoming;
      if (kind != 2) outgoing.push_back({1, header, out.data()});
      if (kind != 2 && kind != 0) incoming.push_back({1, asked, nullptr});
      if (kind == 2 || kind == 3) outgoing.push_back({1, asked, nullptr});
      if (kind != 1) incoming.push_back({1, header, in.data()});
      transfer(links, outgoing, incoming, emu::Clock::now() + std::chrono::milliseconds(100),
          wake.get());
    }
  } catch (const TransferError& error) { notify_failure(links, error.what()); }
  return 0;
}
