// scripts/data.sh with a stand-in for curl that serves files from a folder and breaks off when told
// to.
#pragma once
#include <cstdlib>
#include <filesystem>
#include <string>

#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

namespace train_gpt {

class DataServer {
  public:
    DataServer() {
        // Understands the calls "curl … -sSI … URL" and "curl … -C - -o FILE URL".
        write(folder_ / "curl", R"sh(#!/bin/sh
for last; do :; done
from=$SERVED/${last##*/}
case "$*" in
    *-sSI*)
        [ -n "$OFFLINE" ] && exit 6
        [ -n "$NO_HASH" ] && exit 0
        printf 'HTTP/2 302\r\nX-Linked-ETag: "%s"\r\n\r\n' "$(sha256sum < "$from" | cut -c 1-64)"
        exit 0 ;;
esac
echo "$last" >> "$SERVED/log"
[ -n "$OFFLINE" ] && exit 6
while [ "$1" != -o ]; do shift; done
had=$(stat -c %s "$2" 2> /dev/null || echo 0)
[ -e "$from" ] || exit 22
[ "$had" -ge "$(stat -c %s "$from")" ] && exit 22
tail -c "+$((had + 1))" "$from" | head -c "${BREAK_AFTER:-1000000000}" >> "$2"
[ -z "$BREAK_AFTER" ] || exit 18
)sh");
        std::filesystem::permissions(folder_ / "curl", std::filesystem::perms::owner_all);
        std::filesystem::create_directory(folder_ / "served");
    }

    std::string served(const std::string& name) const { return folder_ / ("served/" + name); }
    std::string data(const std::string& name) const { return folder_ / ("data/" + name); }
    /// URLs requested so far.
    std::string log() const {
        return std::filesystem::exists(served("log")) ? read(served("log")) : "";
    }

    ProgramResult run(const std::string& name, Environment more = {}) const {
        more.insert({{"PATH", folder_.path() + ":" + std::getenv("PATH")},
                     {"SERVED", folder_ / "served"},
                     {"DATA_DIR", folder_ / "data"},
                     {"SHARDS", "2"}});
        return run_program({"bash", "scripts/data.sh", name}, more);
    }

  private:
    TemporaryDirectory folder_;
};

}  // namespace train_gpt
