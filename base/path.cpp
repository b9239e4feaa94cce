#include "base/path.h"

#include <cerrno>
#include <cstdlib>
#include <system_error>

#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

namespace train_gpt {

namespace fs = std::filesystem;

std::string expand_home(const std::string& path) {
    if (!path.starts_with('~')) return path;
    if (path.size() > 1 && path[1] != '/')
        throw Error(path, " begins with the home folder of another user (",
                    path.substr(0, path.find('/')),
                    "), which is not looked up; write the folder itself, or ./", path,
                    " for a name that begins with ~");
    const char* home = std::getenv("HOME");
    if (!home || !*home) {  // as shells do
        const passwd* user = ::getpwuid(::getuid());
        home = user ? user->pw_dir : nullptr;
    }
    if (!home || !*home)
        throw Error("the home folder in ", path,
                    " is not known; set HOME, or write the whole path");
    return home + path.substr(1);
}

std::string describe_broken_link(const fs::path& path) {
    fs::path place;
    for (const fs::path& part : path) {
        place /= part;
        struct stat status {};
        if (::stat(place.c_str(), &status) == 0) continue;
        const int reason = errno;
        std::error_code code;
        fs::path link = place;
        // The last of a chain of links is the one that leads to nothing.
        for (int links = 0; fs::is_symlink(fs::symlink_status(link, code)); ++links) {
            constexpr int most_links = 40;  // as Linux follows
            if (reason == ELOOP && links == most_links)
                return concat(place.string(), " is a symbolic link that leads back to itself");
            link = link.parent_path() / fs::read_symlink(link, code);
        }
        if (reason != ENOENT || link == place) return "";
        return concat(place.string(), " is a dangling symbolic link: its target ", link.string(),
                      " does not exist");
    }
    return "";
}

bool leads_to(const fs::path& path, int descriptor) {
    struct stat named {
    }, open{};
    return ::stat(path.c_str(), &named) == 0 && ::fstat(descriptor, &open) == 0 &&
           named.st_dev == open.st_dev && named.st_ino == open.st_ino;
}

fs::path place_of(int descriptor) {
    std::error_code code;
    const fs::path place = fs::read_symlink(concat("/proc/self/fd/", descriptor), code);
    return leads_to(place, descriptor) ? place : fs::path();
}

}  // namespace train_gpt
