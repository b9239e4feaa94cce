#include "base/thread_priority.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace train_gpt {

void lower_thread_priority() {
    const sched_param none{};
    ::pthread_setschedparam(::pthread_self(), SCHED_BATCH, &none);
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
    constexpr int this_thread = 1, best_effort = 2 << 13, last = 7;
    ::syscall(SYS_ioprio_set, this_thread, 0, best_effort | last);
}

}  // namespace train_gpt
