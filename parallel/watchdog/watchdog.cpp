#include "parallel/watchdog/watchdog.h"

#include <exception>
#include <utility>

#include "base/error.h"
#include "parallel/net/socket.h"
#include "parallel/watchdog/hub.h"
#include "parallel/watchdog/invitation.h"
#include "parallel/watchdog/spoke.h"

namespace train_gpt {

Watchdog::Listener::Listener(int rank, int size) {
    if (rank != 0 || size < 2) return;
    std::string port;
    net::Socket socket = net::open_port(port, "the watchdog");
    invitation_ = watchdog::text_of(watchdog::make_invitation(port));
    fd_ = socket.release();
}

Watchdog::Listener::Listener(Listener&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), invitation_(std::move(other.invitation_)) {}

Watchdog::Listener::~Listener() { net::Socket closed(fd_); }

Watchdog::Watchdog(Listener listener, const std::string& invitation, const Activity& activity,
                   WatchdogOptions options)
    : exceptions_(std::uncaught_exceptions()) {
    if (options.size < 2) return;
    if (!(options.timeout_seconds > 0))
        throw Error("the watchdog's timeout must be above 0 seconds");
    const watchdog::Invitation parsed = watchdog::parse_invitation(invitation);
    if (options.rank == 0)
        watch_ = std::make_unique<watchdog::Hub>(net::Socket(std::exchange(listener.fd_, -1)),
                                                 parsed, activity, std::move(options));
    else
        watch_ = std::make_unique<watchdog::Spoke>(parsed, activity, std::move(options));
    watch_->start();
}

Watchdog::~Watchdog() {
    if (!watch_) return;
    if (std::uncaught_exceptions() > exceptions_) watch_->report("it ended by an exception", 0);
    watch_->leave();
}

bool Watchdog::report(const std::string& message, int exit_code) {
    return watch_ && watch_->report(message, exit_code);
}

}  // namespace train_gpt
