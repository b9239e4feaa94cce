// A library in front of the system's: disks that fail or do not answer, and clocks that jump. Tests
// load it by LD_PRELOAD.
//
//   FAULTY_DISK=FILE      while FILE exists, fsync() of what belongs to an unfinished checkpoint
//                         does what FILE says: "wait" until it is gone, or fail with this errno
//   FAULTY_CLOCK=SECONDS  each reading of the wall clock is off by up to so many seconds, forwards
//                         or backwards
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

namespace {

/// Whether a descriptor is of an unfinished checkpoint, or of a file in it.
bool is_of_checkpoint(int fd) {
    char link[64], path[4096];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = ::readlink(link, path, sizeof path - 1);
    if (length < 0) return false;
    path[length] = '\0';
    const char* const step = std::strstr(path, "/step-");
    return step && std::strstr(step, ".tmp");
}

/// 0: to wait; −1: there is no fault now.
int fault_of_disk() {
    const char* const name = std::getenv("FAULTY_DISK");
    std::FILE* const file = name ? std::fopen(name, "r") : nullptr;
    if (!file) return -1;
    char text[16] = "";
    const bool is_read = std::fgets(text, sizeof text, file) != nullptr;
    std::fclose(file);
    return is_read ? std::atoi(text) : -1;
}

int64_t jump() {
    static const char* const most = std::getenv("FAULTY_CLOCK");
    static std::atomic<uint64_t> readings{0};
    if (!most) return 0;
    const int64_t limit = std::atoll(most);
    const uint64_t random = ++readings * 0x9e3779b97f4a7c15 >> 33;
    return static_cast<int64_t>(random % static_cast<uint64_t>(2 * limit + 1)) - limit;
}

}  // namespace

extern "C" {

int fsync(int fd) {
    if (is_of_checkpoint(fd)) {
        int fault;
        while ((fault = fault_of_disk()) == 0) ::usleep(2000);
        if (fault > 0) {
            errno = fault;
            return -1;
        }
    }
    return static_cast<int>(::syscall(SYS_fsync, fd));
}

int clock_gettime(clockid_t clock, timespec* time) noexcept {
    const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
    if (result == 0 && clock == CLOCK_REALTIME) time->tv_sec += jump();
    return result;
}

time_t time(time_t* result) noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(timeval* result, void*) noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    *result = {now.tv_sec, now.tv_nsec / 1000};
    return 0;
}

}  // extern "C"
