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
  static const char* names[] = {"HcclBarrier", "HcclAllReduce", "HcclAllGather", "HcclAllGatherV", "HcclReduceScatter",
      "HcclReduceScatterV", "HcclBroadcast", "HcclReduce", "HcclScatter", "HcclAlltoAll", "HcclAlltoAllV", "HcclSend", "HcclRecv",
      "a failure", "MoeDistributeDispatch", "MoeDistributeCombine", "MatmulAllReduce", "AllGatherMatmul", "MatmulReduceScatter",
      "DistributeBarrier", "AlltoAllvGroupedMatMul", "GroupedMatMulAlltoAllv", "AlltoAllMatmul", "MatmulAlltoAll"};
  return kind < std::size(names) ? names[kind] : "an unknown call";
}

std::string Header::describe() const {
  if (kind == kBarrier || kind == kDistributeBarrier) return kind_name(kind);
  std::string out = text(kind_name(kind), "(");
  if (count) out += text(count, " ");
  out += data_type(type).name;
  if (op != 0xff) out += text(", ", reduction_name(op));
  if (root != kNone) out += text(", root ", root);
  return out + ")";
}

namespace {

// The state of one connection within a transfer.
struct Lane {
  int peer;
  std::vector<const Outgoing*> out;
  size_t sending = 0;  // index in out
  uint64_t sent = 0;   // bytes of it, the header's first
  std::vector<const Incoming*> waiting;
  Header header;          // that is arriving
  uint64_t received = 0;  // bytes of the arriving message, its header's first
  char* target = nullptr;
  std::optional<Early> early;  // where it goes if it was not expected yet
  bool has_header = false;
  std::string failure;  // the peer's, as it arrives
  bool broken = false;  // the peer reads no more; what it sent before may say why

  bool wants_to_send() const { return sending < out.size() && !broken; }
  bool wants_to_receive() const { return !waiting.empty() || received > 0 || broken; }
  bool done() const { return !wants_to_send() && !wants_to_receive(); }
};

bool point_to_point(uint8_t kind) { return kind == kSend || kind == kReceive; }

[[noreturn]] void mismatch(int peer, const Header& theirs, const Header& ours) {
  // What they should have called is the other end of ours.
  Header mine = ours;
  if (ours.kind == kSend)
    mine.kind = kReceive;
  else if (ours.kind == kReceive)
    mine.kind = kSend;
  if (theirs.describe() == mine.describe()) {
    throw Broken(kParameter, text("rank ", peer, " sends ", theirs.bytes, " bytes to this rank's ", mine.describe(), ", where ",
                                 ours.bytes, " are expected; the counts of the ranks must fit together"));
  }
  throw Broken(kParameter, text("rank ", peer, " called ", theirs.describe(), " where this rank called ", mine.describe(),
                               "; all ranks must make the same calls in the same order"));
}

bool same(const Header& a, const Header& b) {
  return a.kind == b.kind && a.type == b.type && a.op == b.op && a.root == b.root && a.count == b.count && a.bytes == b.bytes;
}

// Finds the call that a message is for. Point-to-point messages may come before their call.
const Incoming* take(Lane& lane, const Header& header) {
  for (auto at = lane.waiting.begin(); at != lane.waiting.end(); ++at) {
    if ((*at)->header.kind != header.kind) continue;
    if (!same((*at)->header, header)) mismatch(lane.peer, header, (*at)->header);
    const auto* found = *at;
    lane.waiting.erase(at);
    return found;
  }
  const auto& expected = lane.waiting.front()->header;
  if (!point_to_point(header.kind) || !point_to_point(expected.kind)) mismatch(lane.peer, header, expected);
  return nullptr;
}

[[noreturn]] void gone(int peer) {
  throw Broken(kRemote,
      text("rank ", peer, " closed its connection: its process ended, or it destroyed the communicator; look at its output"));
}

// False when nothing can be sent now.
bool send_some(Lane& lane, Link& link) {
  bool moved = false;
  while (lane.wants_to_send()) {
    const auto& message = *lane.out[lane.sending];
    iovec parts[2];
    int count = 0;
    if (lane.sent < sizeof(Header)) {
      parts[count++] = {
          const_cast<char*>(reinterpret_cast<const char*>(&message.header)) + lane.sent, sizeof(Header) - lane.sent};
    }
    const uint64_t done = lane.sent < sizeof(Header) ? 0 : lane.sent - sizeof(Header);
    if (done < message.header.bytes)
      parts[count++] = {static_cast<char*>(const_cast<void*>(message.data)) + done, message.header.bytes - done};
    msghdr packet{};
    packet.msg_iov = parts;
    packet.msg_iovlen = count;
    const ssize_t bytes = sendmsg(link.socket.get(), &packet, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (bytes < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return moved;
      lane.broken = true;
      return true;
    }
    moved = true;
    lane.sent += bytes;
    link.within_message = lane.sent < sizeof(Header) + message.header.bytes;
    if (lane.sent == sizeof(Header) + message.header.bytes) {
      lane.sent = 0;
      ++lane.sending;
    } else if (lane.sent > sizeof(Header)) {
      return true;  // the other directions have their turn
    }
  }
  return moved;
}

bool receive_some(Lane& lane, Link& link) {
  bool moved = false;
  while (lane.wants_to_receive()) {
    char* to;
    uint64_t room;
    if (!lane.has_header) {
      to = reinterpret_cast<char*>(&lane.header) + lane.received;
      room = sizeof(Header) - lane.received;
    } else {
      const uint64_t done = lane.received - sizeof(Header);
      to = lane.target + done;
      room = lane.header.bytes - done;
    }
    const ssize_t bytes = recv(link.socket.get(), to, room, MSG_DONTWAIT);
    if (bytes < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return moved;
      gone(lane.peer);
    }
    if (bytes == 0) gone(lane.peer);
    moved = true;
    lane.received += bytes;
    if (!lane.has_header && lane.received == sizeof(Header)) {
      lane.has_header = true;
      if (lane.header.kind == kFailed) {
        lane.failure.resize(std::min<uint64_t>(lane.header.bytes, 4096));
        lane.header.bytes = lane.failure.size();
        lane.target = lane.failure.data();
      } else if (const auto* call = take(lane, lane.header)) {
        lane.target = static_cast<char*>(call->data);
      } else {
        lane.early.emplace(Early{lane.header, std::vector<char>(lane.header.bytes)});
        lane.target = lane.early->bytes.data();
      }
    }
    if (lane.has_header && lane.received == sizeof(Header) + lane.header.bytes) {
      if (lane.header.kind == kFailed) throw Broken(kRemote, text("rank ", lane.peer, " failed: ", lane.failure));
      if (lane.early) link.early.push_back(std::move(*lane.early));
      lane.early.reset();
      lane.has_header = false;
      lane.received = 0;
    } else if (lane.has_header && lane.received > sizeof(Header)) {
      return true;
    }
  }
  return moved;
}

constexpr int kLook = 50;  // milliseconds between looks at whether the stream was aborted

int milliseconds(Deadline deadline) {
  if (!deadline) return kLook;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*deadline - Clock::now()).count() + 1;
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

// False when the deadline passed.
bool wait(std::vector<pollfd>& files, Deadline deadline) {
  while (true) {
    check_not_aborted();
    const int ready = poll(files.data(), files.size(), std::min(milliseconds(deadline), kLook));
    if (ready > 0) break;
    if (ready == 0 && deadline && Clock::now() >= *deadline) return false;
    if (ready < 0 && errno != EINTR) throw Broken(kInternal, text("poll: ", std::strerror(errno)));
  }
  if (files[0].revents) throw Broken(kSuspending, "the communicator was destroyed or suspended meanwhile");
  return true;
}

}  // namespace

void give_up(std::vector<Link>& links, const std::string& reason) {
  Header header;
  header.kind = kFailed;
  header.bytes = std::min<size_t>(reason.size(), 4096);
  const std::string message = std::string(reinterpret_cast<const char*>(&header), sizeof header) + reason.substr(0, header.bytes);
  for (auto& link : links) {
    if (link.socket.get() < 0) continue;
    // Closing it would take away what is still on its way to the peer.
    if (!link.within_message && send(link.socket.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 &&
        errno == EPIPE)
      continue;
    shutdown(link.socket.get(), SHUT_WR);
  }
}

void pause(Deadline deadline, int wake) {
  std::vector<pollfd> files{{wake, POLLIN, 0}};
  wait(files, deadline);
}

void transfer(
    std::vector<Link>& links, const std::vector<Outgoing>& out, const std::vector<Incoming>& in, Deadline deadline, int wake) {
  std::vector<Lane> lanes(links.size());
  for (size_t i = 0; i < lanes.size(); ++i) lanes[i].peer = static_cast<int>(i);
  for (const auto& message : out) lanes[message.peer].out.push_back(&message);
  for (const auto& message : in) lanes[message.peer].waiting.push_back(&message);
  for (auto& lane : lanes) {  // first what has come already
    auto& early = links[lane.peer].early;
    for (auto at = early.begin(); at != early.end() && !lane.waiting.empty();) {
      const auto* call = take(lane, at->header);
      if (call && !at->bytes.empty()) std::memcpy(call->data, at->bytes.data(), at->bytes.size());
      at = call ? early.erase(at) : std::next(at);
    }
  }
  std::erase_if(lanes, [](const Lane& lane) { return lane.done(); });
  while (!lanes.empty()) {
    bool moved = false;
    for (auto& lane : lanes) moved |= send_some(lane, links[lane.peer]);
    for (auto& lane : lanes) moved |= receive_some(lane, links[lane.peer]);  // when all know what this rank called
    std::erase_if(lanes, [](const Lane& lane) { return lane.done(); });
    if (moved || lanes.empty()) continue;
    std::vector<pollfd> files{{wake, POLLIN, 0}};
    for (const auto& lane : lanes) {
      const short events = (lane.wants_to_send() ? POLLOUT : 0) | (lane.wants_to_receive() ? POLLIN : 0);
      files.push_back({links[lane.peer].socket.get(), events, 0});
    }
    if (!wait(files, deadline)) {
      std::string missing;
      for (const auto& lane : lanes) {
        missing += text(missing.empty() ? "" : ", ", lane.peer);
        if (const auto& early = links[lane.peer].early; !early.empty())
          missing += text(" (which is in ", early.front().header.describe(), ")");
      }
      throw Broken(kTimeout, text("nothing from rank ", missing,
                                 " in time; it did not make this call, is slower than HCCL_EXEC_TIMEOUT allows, or hangs"));
    }
  }
}

}  // namespace emu::hccl
