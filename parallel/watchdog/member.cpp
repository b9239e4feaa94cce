#include "parallel/watchdog/member.h"

namespace train_gpt::watchdog {

Line failure_of(const Line& who, const Line& message, int exit_code) {
    return line("%s%s %s", who.c_str(), exit_code == 0 ? " failed:" : ":", message.c_str());
}

Line describe_failure(const Line& who, const Member& member, const Line& verdict) {
    const ActivityReport& last = member.report;
    const Line collective = last.collectives == 0 ? Line("it has entered no collective")
                                                  : line("its last collective was %s number %lld",
                                                         last.collective.c_str(),
                                                         static_cast<long long>(last.collectives));
    return line("%s %s; %s, in step %lld (%s)", who.c_str(), verdict.c_str(), collective.c_str(),
                static_cast<long long>(last.step), last.phase.c_str());
}

}  // namespace train_gpt::watchdog
