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

/// Makes an invitation to this host and `port`, with a new secret. Throws Error if the kernel gives
/// no random numbers or no list of addresses.
Invitation make_invitation(const std::string& port);

// The two ends of a connection to the port. If this build has TLS, the connection is TLS, and its
// key follows from the invitation. Otherwise the connection is in clear.
net::Channel call(net::Socket socket, const Invitation& invitation);
net::Channel answer(net::Socket socket, const Invitation& invitation);

/// "<port> <64 hexadecimal digits> <address> …"
std::string text_of(const Invitation& invitation);
/// Throws Error if the text is not an invitation.
Invitation parse_invitation(const std::string& text);

}  // namespace train_gpt::watchdog
