// What rank 0 sends to the other ranks so that they can find its port and are admitted.
#pragma once
#include <string>
#include <vector>

#include "parallel/net/channel.h"
#include "parallel/watchdog/protocol.h"

namespace train_gpt::watchdog {

struct Invitation {
    std::string port;
    Key client, hub;  // what a rank shows to rank 0, and what rank 0 shows in return
    std::vector<std::string> addresses;
};

/// An invitation to this host and `port`, with a new secret. Throws Error when the kernel gives no
/// random numbers or no list of addresses.
Invitation make_invitation(const std::string& port);

// A connection to the port: TLS whose key the invitation is, where this build has TLS, else in clear.
net::Channel call(net::Socket socket, const Invitation& invitation);
net::Channel answer(net::Socket socket, const Invitation& invitation);

/// "<port> <64 hexadecimal digits> <address> …"
std::string text_of(const Invitation& invitation);
/// Throws Error when the text is not an invitation.
Invitation parse_invitation(const std::string& text);

}  // namespace train_gpt::watchdog
