#include "parallel/watchdog/invitation.h"

#include <sstream>
#include <utility>

#include "base/error.h"
#include "parallel/net/socket.h"

namespace train_gpt::watchdog {

Invitation make_invitation(const std::string& port) {
    Invitation invitation;
    invitation.port = port;
    for (Key* key : {&invitation.client, &invitation.hub}) net::fill_random(*key);
    invitation.addresses = net::own_addresses();
    return invitation;
}

namespace {

const std::string identity = "train_gpt watchdog 2";

std::string key_of(const Invitation& invitation) {
    std::string key;
    for (const Key& half : {invitation.client, invitation.hub})
        key.append(reinterpret_cast<const char*>(half.data()), half.size());
    return key;
}

}  // namespace

net::Channel call(net::Socket socket, const Invitation& invitation) {
    if (!net::has_tls()) return net::Channel(std::move(socket));
    return net::Channel::call(std::move(socket), identity, key_of(invitation));
}

net::Channel answer(net::Socket socket, const Invitation& invitation) {
    if (!net::has_tls()) return net::Channel(std::move(socket));
    return net::Channel::answer(std::move(socket),
                                [key = key_of(invitation)](const std::string& name) {
                                    return name == identity ? key : std::string();
                                });
}

std::string text_of(const Invitation& invitation) {
    std::string text = invitation.port + ' ';
    for (const Key& key : {invitation.client, invitation.hub}) text += net::hexadecimal(key);
    for (const std::string& address : invitation.addresses) text += ' ' + address;
    return text;
}

Invitation parse_invitation(const std::string& text) {
    Invitation invitation;
    std::istringstream words(text);
    std::string secret;
    words >> invitation.port >> secret;
    for (std::string address; words >> address;) invitation.addresses.push_back(address);
    if (secret.size() != 4 * sizeof(Key) ||
        secret.find_first_not_of("0123456789abcdef") != std::string::npos ||
        invitation.addresses.empty())
        throw Error(
            "the watchdog's invitation from rank 0 is damaged; this is a fault of the program, "
            "please "
            "report it");
    for (size_t i = 0; i < 2 * sizeof(Key); ++i)
        (i < sizeof(Key) ? invitation.client : invitation.hub)[i % sizeof(Key)] =
            static_cast<uint8_t>(std::stoi(secret.substr(2 * i, 2), nullptr, 16));
    return invitation;
}

}  // namespace train_gpt::watchdog
