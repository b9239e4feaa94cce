// What rank 0 sends to the other ranks so that they find its port and are let in.
#pragma once
#include <string>
#include <vector>

#include "parallel/watchdog/protocol.h"

namespace train_gpt::watchdog {

struct Invitation {
    std::string port;
    Key client, hub;  // what a rank shows to rank 0, and what rank 0 then shows to it
    std::vector<std::string> addresses;
};

/// To this host and that port, with a secret that is new. Throws Error.
Invitation make_invitation(const std::string& port);

/// "<port> <64 hexadecimal digits> <address> …"
std::string text_of(const Invitation& invitation);
/// Throws Error where the text is no such.
Invitation parse_invitation(const std::string& text);

}  // namespace train_gpt::watchdog
