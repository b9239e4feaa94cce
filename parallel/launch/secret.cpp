#include "parallel/launch/secret.h"

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "parallel/net/socket.h"

namespace train_gpt {

namespace {

namespace fs = std::filesystem;

constexpr const char* remedy =
    "; set TRAIN_GPT_SECRET to the same text on all ranks, or TRAIN_GPT_SECRET_FILE to a file that "
    "all hosts see";

Error failure(const std::string& file, const std::string& what) {
    return Error("the job's secret cannot be taken from ", file, ": ", what, remedy);
}

class File {
  public:
    File(const std::string& path, int flags)
        : fd_(::open(path.c_str(), flags | O_CLOEXEC, S_IRUSR | S_IWUSR)) {}
    ~File() {
        if (fd_ >= 0) ::close(fd_);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int fd() const { return fd_; }

  private:
    int fd_;
};

/// Makes the file, unless another rank is faster: it appears under its name with its contents.
void create(const std::string& path) {
    std::error_code ignored;
    fs::create_directories(fs::path(path).parent_path(), ignored);
    const std::string random = net::random_text(32), name = net::random_text(8);
    const auto hexadecimal = [](const std::string& text) {
        return net::hexadecimal({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    };
    const std::string temporary = path + "." + hexadecimal(name), text = hexadecimal(random) + "\n";
    {
        const File file(temporary, O_WRONLY | O_CREAT | O_EXCL);
        const bool written =
            file.fd() >= 0 &&
            ::write(file.fd(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
            ::fsync(file.fd()) == 0;
        if (!written) {
            const std::string reason = std::strerror(errno);
            ::unlink(temporary.c_str());
            throw failure(path, "it cannot be written (" + reason + ")");
        }
    }
    const bool linked = ::link(temporary.c_str(), path.c_str()) == 0 || errno == EEXIST;
    const std::string reason = std::strerror(errno);
    ::unlink(temporary.c_str());
    if (!linked) throw failure(path, reason);
}

std::string read_secret(const std::string& path) {
    if (::access(path.c_str(), F_OK) != 0 && errno == ENOENT) create(path);
    const File file(path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    struct stat status {};
    if (file.fd() < 0 || ::fstat(file.fd(), &status) != 0)
        throw failure(path, std::strerror(errno));
    if (!S_ISREG(status.st_mode)) throw failure(path, "it is not a file");
    if (status.st_uid != ::geteuid()) throw failure(path, "it belongs to another user");
    if (status.st_mode & (S_IRWXG | S_IRWXO))
        throw failure(path, "other users have access to it (chmod 600 " + path + " ends that)");
    std::array<char, 4096> text;
    const ssize_t n = ::read(file.fd(), text.data(), text.size());
    if (n < 0) throw failure(path, std::strerror(errno));
    std::string secret(text.data(), static_cast<size_t>(n));
    while (secret.ends_with('\n') || secret.ends_with('\r')) secret.pop_back();
    return secret;
}

constexpr size_t shortest = 16;

}  // namespace

Secret find_secret(const Variables& variables) {
    Secret secret;
    if (const char* text = variables("TRAIN_GPT_SECRET")) {
        secret = {text, "TRAIN_GPT_SECRET"};
    } else if (const char* file = variables("TRAIN_GPT_SECRET_FILE"); file && *file) {
        secret = {read_secret(file), file};
    } else {
        const char* home = variables("HOME");
        if (!home || !*home) throw Error("this job has no secret, and HOME is not set", remedy);
        const std::string path = std::string(home) + "/.config/train_gpt/secret";
        secret = {read_secret(path), path};
    }
    if (secret.text.size() < shortest)
        throw Error("the job's secret (", secret.source, ") has fewer than ", shortest,
                    " characters; take a random one, such as `openssl rand -hex 32` prints");
    return secret;
}

Secret take_secret() {
    constexpr const char* name = "TRAIN_GPT_SECRET";
    Secret secret = find_secret([](const std::string& of) { return std::getenv(of.c_str()); });
    // Unless a library has set it again, this is the memory that the kernel shows to others.
    if (char* text = std::getenv(name)) ::explicit_bzero(text, std::strlen(text));
    ::unsetenv(name);
    return secret;
}

}  // namespace train_gpt
