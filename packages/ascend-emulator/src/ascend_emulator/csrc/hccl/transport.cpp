// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
#include "transport.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace emu::hccl {

File::~File() {
  if (fd_ >= 0) close(fd_);
}

const char* kind_name(uint8_t kind) {
  static const char* names[] = {"HcclBarrier", "HcclAllReduce", "HcclAllGather", "HcclAllGatherV",
      "HcclReduceScatter", "HcclReduceScatterV", "HcclBroadcast", "HcclReduce", "HcclScatter",
      "HcclAlltoAll", "HcclAlltoAllV", "HcclSend", "HcclRecv", "a failure", "MoeDistributeDispatch",
      "MoeDistributeCombine", "MatmulAllReduce", "AllGatherMatmul", "MatmulReduceScatter",
      "DistributeBarrier", "AlltoAllvGroupedMatMul", "GroupedMatMulAlltoAllv", "AlltoAllMatmul",
      "MatmulAlltoAll"};
  return kind < std::size(names) ? names[kind] : "an unknown call";
}

std::string Header::describe() const {
  if (kind == kBarrier || kind == kDistributeBarrier) return kind_name(kind);
  std::string out = text(kind_name(kind), "(");
  if (count) out += text(count, " ");
  out += data_type_name(type);
  if (op != 0xff) out += text(", ", reduction_name(op));
  if (root != kNone) out += text(", root ", root);
  return out + ")";
}

namespace {

// State of one connection within a transfer.
struct Channel {
  int peer;
  std::vector<const Outgoing*> out;
  size_t sending = 0;  // index in out
  uint64_t sent = 0;   // bytes of it, the header's first
  std::vector<const Incoming*> waiting;
  Header header;          // of the message being received
  uint64_t received = 0;  // bytes of the arriving message, its header's first
  char* target = nullptr;
  std::optional<UnexpectedMessage> unexpected;  // destination of a message without a matching call
  bool has_header = false;
  std::string failure;       // the peer's failure message
  bool send_failed = false;  // keep receiving: the peer may have sent a reason

  bool wants_to_send() const { return sending < out.size() && !send_failed; }
  bool wants_to_receive() const { return !waiting.empty() || received > 0 || send_failed; }
  bool done() const { return !wants_to_send() && !wants_to_receive(); }
};

bool point_to_point(uint8_t kind) { return kind == kSend || kind == kReceive; }

[[noreturn]] void mismatch(int peer, const Header& theirs, const Header& ours) {
  // The peer's matching call of a send is a receive, and vice versa.
  Header mine = ours;
  if (ours.kind == kSend) mine.kind = kReceive;
  else if (ours.kind == kReceive) mine.kind = kSend;
  if (theirs.describe() == mine.describe()) {
    throw TransferError(kParameter,
        text("rank ", peer, " sends ", theirs.bytes, " bytes to this rank's ", mine.describe(),
            ", where ", ours.bytes, " are expected; the counts of the ranks must fit together"));
  }
  throw TransferError(
      kParameter, text("rank ", peer, " called ", theirs.describe(), " where this rank called ",
                      mine.describe(), "; all ranks must make the same calls in the same order"));
}

bool same_call(const Header& a, const Header& b) {
  return a.kind == b.kind && a.type == b.type && a.op == b.op && a.root == b.root &&
         a.count == b.count && a.bytes == b.bytes;
}

// Streams run in any order that events allow. Ranks that run a communicator's calls in different
// orders would wait for each other on an NPU, or exchange the data of different calls.
void check_order(int peer, const Header& theirs, const Header& ours) {
  if (theirs.overtaken == ours.overtaken || theirs.overtaken == kNone || ours.overtaken == kNone)
    return;
  const auto ahead = [](uint32_t calls) {
    return calls ? text("ahead of ", calls, " issued earlier") : "in turn";
  };
  throw TransferError(
      kParameter, text("rank ", peer, " runs ", theirs.describe(), " ", ahead(theirs.overtaken),
                      " and this rank ", ahead(ours.overtaken),
                      ": streams ran the communicator's calls in another order than they were "
                      "issued; use one stream for a communicator, or "
                      "order its streams by events"));
}

// Finds the call that matches a message. Point-to-point messages may arrive before their call.
const Incoming* match_receive(Channel& channel, const Header& header, double& latest) {
  for (auto at = channel.waiting.begin(); at != channel.waiting.end(); ++at) {
    if ((*at)->header.kind != header.kind) continue;
    check_order(channel.peer, header, (*at)->header);
    if (!same_call((*at)->header, header)) mismatch(channel.peer, header, (*at)->header);
    const auto* found = *at;
    latest = std::max(latest, header.modelled_start);
    channel.waiting.erase(at);
    return found;
  }
  if (channel.waiting.empty())
    return nullptr;  // a send failed: what arrives is read up to the peer's reason
  const auto& expected = channel.waiting.front()->header;
  if (!point_to_point(header.kind) || !point_to_point(expected.kind)) {
    check_order(channel.peer, header, expected);
    mismatch(channel.peer, header, expected);
  }
  return nullptr;
}

// Memory for an early message grows with what has arrived: a header's length is not trusted.
constexpr uint64_t kStep = 1 << 20;

void begin_unexpected(Channel& channel, const Link& link) {
  const auto& header = channel.header;
  if (link.unexpected.size() >= kEarlyMessages || header.bytes > kEarlyBytes ||
      link.unexpected_bytes > kEarlyBytes - header.bytes) {
    throw TransferError(
        kParameter, text("rank ", channel.peer, " sends ", header.describe(), " of ", header.bytes,
                        " bytes before this rank asks for it; at most ", kEarlyMessages,
                        " messages and ", kEarlyBytes, " bytes may be ahead of their calls"));
  }
  channel.unexpected.emplace(UnexpectedMessage{header, {}});
}

[[noreturn]] void raise_closed(int peer) {
  throw TransferError(kRemote, text("rank ", peer,
                                   " closed its connection: its process ended, or it destroyed the "
                                   "communicator; look at its output"));
}

// False if nothing could be sent.
bool send_some(Channel& channel, Link& link) {
  bool moved = false;
  while (channel.wants_to_send()) {
    const auto& message = *channel.out[channel.sending];
    iovec parts[2];
    int count = 0;
    if (channel.sent < sizeof(Header)) {
      parts[count++] = {
          const_cast<char*>(reinterpret_cast<const char*>(&message.header)) + channel.sent,
          sizeof(Header) - channel.sent};
    }
    const uint64_t done = channel.sent < sizeof(Header) ? 0 : channel.sent - sizeof(Header);
    if (done < message.header.bytes)
      parts[count++] = {
          static_cast<char*>(const_cast<void*>(message.data)) + done, message.header.bytes - done};
    msghdr packet{};
    packet.msg_iov = parts;
    packet.msg_iovlen = count;
    const ssize_t bytes = sendmsg(link.socket.get(), &packet, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (bytes < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return moved;
      channel.send_failed = true;
      return true;
    }
    moved = true;
    channel.sent += bytes;
    link.within_message = channel.sent < sizeof(Header) + message.header.bytes;
    if (channel.sent == sizeof(Header) + message.header.bytes) {
      channel.sent = 0;
      ++channel.sending;
    } else if (channel.sent > sizeof(Header)) {
      return true;  // let the other connections progress
    }
  }
  return moved;
}

bool receive_some(Channel& channel, Link& link, double& latest) {
  bool moved = false;
  while (channel.wants_to_receive()) {
    char* to;
    uint64_t room;
    if (!channel.has_header) {
      to = reinterpret_cast<char*>(&channel.header) + channel.received;
      room = sizeof(Header) - channel.received;
    } else {
      const uint64_t done = channel.received - sizeof(Header);
      room = channel.header.bytes - done;
      if (channel.unexpected) {
        auto& bytes = channel.unexpected->bytes;
        if (bytes.size() == done) bytes.resize(done + std::min(room, std::max(kStep, done)));
        room = bytes.size() - done;
        channel.target = bytes.data();
      }
      to = channel.target + done;
    }
    const ssize_t bytes = recv(link.socket.get(), to, room, MSG_DONTWAIT);
    if (bytes < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return moved;
      raise_closed(channel.peer);
    }
    if (bytes == 0) raise_closed(channel.peer);
    moved = true;
    channel.received += bytes;
    if (!channel.has_header && channel.received == sizeof(Header)) {
      channel.has_header = true;
      if (channel.header.kind == kFailed) {
        channel.failure.resize(std::min<uint64_t>(channel.header.bytes, 4096));
        channel.header.bytes = channel.failure.size();
        channel.target = channel.failure.data();
      } else if (const auto* call = match_receive(channel, channel.header, latest)) {
        channel.target = static_cast<char*>(call->data);
      } else {
        begin_unexpected(channel, link);
      }
    }
    if (channel.has_header && channel.received == sizeof(Header) + channel.header.bytes) {
      if (channel.header.kind == kFailed)
        throw TransferError(kRemote, text("rank ", channel.peer, " failed: ", channel.failure));
      if (channel.unexpected) {
        link.unexpected_bytes += channel.header.bytes;
        link.unexpected.push_back(std::move(*channel.unexpected));
      }
      channel.unexpected.reset();
      channel.has_header = false;
      channel.received = 0;
    } else if (channel.has_header && channel.received > sizeof(Header)) {
      return true;
    }
  }
  return moved;
}

constexpr int kAbortPollMs = 50;  // milliseconds between checks for an aborted stream

int milliseconds(Deadline deadline) {
  if (!deadline) return kAbortPollMs;
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(*deadline - Clock::now()).count() + 1;
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

// False on timeout.
bool wait(std::vector<pollfd>& files, Deadline deadline) {
  while (true) {
    check_not_aborted();
    const int ready =
        poll(files.data(), files.size(), std::min(milliseconds(deadline), kAbortPollMs));
    if (ready > 0) break;
    if (ready == 0 && deadline && Clock::now() >= *deadline) return false;
    if (ready < 0 && errno != EINTR)
      throw TransferError(kInternal, text("poll: ", std::strerror(errno)));
  }
  if (files[0].revents)
    throw TransferError(kSuspending, "the communicator was destroyed or suspended meanwhile");
  return true;
}

}  // namespace

void notify_failure(std::vector<Link>& links, const std::string& reason) {
  Header header;
  header.kind = kFailed;
  header.bytes = std::min<size_t>(reason.size(), 4096);
  const std::string message = std::string(reinterpret_cast<const char*>(&header), sizeof header) +
                              reason.substr(0, header.bytes);
  for (auto& link : links) {
    if (link.socket.get() < 0) continue;
    // Shut down instead of close: close would drop data in flight.
    if (!link.within_message &&
        send(link.socket.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 &&
        errno == EPIPE)
      continue;
    shutdown(link.socket.get(), SHUT_WR);
  }
}

void pause(Deadline deadline, int wake) {
  std::vector<pollfd> files{{wake, POLLIN, 0}};
  wait(files, deadline);
}

double transfer(std::vector<Link>& links, const std::vector<Outgoing>& out,
    const std::vector<Incoming>& in, Deadline deadline, int wake) {
  std::vector<Channel> channels(links.size());
  double latest = 0;
  for (size_t i = 0; i < channels.size(); ++i) channels[i].peer = static_cast<int>(i);
  for (const auto& message : out) channels[message.peer].out.push_back(&message);
  for (const auto& message : in) channels[message.peer].waiting.push_back(&message);
  for (auto& channel : channels) {  // messages that have already arrived
    auto& unexpected = links[channel.peer].unexpected;
    for (auto at = unexpected.begin(); at != unexpected.end() && !channel.waiting.empty();) {
      const auto* call = match_receive(channel, at->header, latest);
      if (call && !at->bytes.empty()) std::memcpy(call->data, at->bytes.data(), at->bytes.size());
      if (call) links[channel.peer].unexpected_bytes -= at->bytes.size();
      at = call ? unexpected.erase(at) : std::next(at);
    }
  }
  std::erase_if(channels, [](const Channel& channel) { return channel.done(); });
  while (!channels.empty()) {
    bool moved = false;
    for (auto& channel : channels) moved |= send_some(channel, links[channel.peer]);
    for (auto& channel : channels)
      moved |=
          receive_some(channel, links[channel.peer], latest);  // after this rank's headers are sent
    std::erase_if(channels, [](const Channel& channel) { return channel.done(); });
    if (moved || channels.empty()) continue;
    std::vector<pollfd> files{{wake, POLLIN, 0}};
    for (const auto& channel : channels) {
      const short events =
          (channel.wants_to_send() ? POLLOUT : 0) | (channel.wants_to_receive() ? POLLIN : 0);
      files.push_back({links[channel.peer].socket.get(), events, 0});
    }
    if (!wait(files, deadline)) {
      std::string missing;
      for (const auto& channel : channels) {
        missing += text(missing.empty() ? "" : ", ", channel.peer);
        if (const auto& unexpected = links[channel.peer].unexpected; !unexpected.empty())
          missing += text(" (which is in ", unexpected.front().header.describe(), ")");
      }
      throw TransferError(kTimeout, text("nothing from rank ", missing,
                                        " in time; it did not make this call, is slower than "
                                        "HCCL_EXEC_TIMEOUT allows, or hangs"));
    }
  }
  return latest;
}

}  // namespace emu::hccl
