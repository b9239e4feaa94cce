#include "parallel/watchdog/invitation.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <sstream>

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "base/error.h"

namespace train_gpt::watchdog {

namespace {

/// This host's numeric addresses except link-local ones; loopback last.
std::vector<std::string> own_addresses() {
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0)
        throw Error("this host's network addresses cannot be listed: ", std::strerror(errno));
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
    std::vector<std::string> addresses, loopback;
    for (const ifaddrs* at = list; at; at = at->ifa_next) {
        if (!at->ifa_addr || !(at->ifa_flags & IFF_UP)) continue;
        socklen_t length = 0;
        if (at->ifa_addr->sa_family == AF_INET) {
            length = sizeof(sockaddr_in);
            const auto* ip = reinterpret_cast<const sockaddr_in*>(at->ifa_addr);
            if (ntohl(ip->sin_addr.s_addr) >> 16 == 0xa9fe) continue;  // 169.254.0.0/16
        } else if (at->ifa_addr->sa_family == AF_INET6) {
            length = sizeof(sockaddr_in6);
            const auto* ip = reinterpret_cast<const sockaddr_in6*>(at->ifa_addr);
            if (IN6_IS_ADDR_LINKLOCAL(&ip->sin6_addr)) continue;
        } else {
            continue;
        }
        std::array<char, NI_MAXHOST> text;
        if (::getnameinfo(at->ifa_addr, length, text.data(), text.size(), nullptr, 0,
                          NI_NUMERICHOST) == 0)
            (at->ifa_flags & IFF_LOOPBACK ? loopback : addresses).emplace_back(text.data());
    }
    addresses.insert(addresses.end(), loopback.begin(), loopback.end());
    return addresses;
}

}  // namespace

Invitation make_invitation(const std::string& port) {
    Invitation invitation;
    invitation.port = port;
    for (Key* key : {&invitation.client, &invitation.hub})
        if (::getrandom(key->data(), key->size(), 0) != static_cast<ssize_t>(key->size()))
            throw Error("the kernel gives no random numbers for the watchdog: ",
                        std::strerror(errno));
    invitation.addresses = own_addresses();
    return invitation;
}

std::string text_of(const Invitation& invitation) {
    std::string text = invitation.port + ' ';
    for (const Key& key : {invitation.client, invitation.hub})
        for (uint8_t byte : key) {
            text += "0123456789abcdef"[byte >> 4];
            text += "0123456789abcdef"[byte & 15];
        }
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
