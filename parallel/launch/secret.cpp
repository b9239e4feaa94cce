#include "parallel/launch/secret.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include <dlfcn.h>
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
    const File file(path, O_RDONLY);
    struct stat status {};
    if (file.fd() < 0 || ::fstat(file.fd(), &status) != 0)
        throw failure(path, std::strerror(errno));
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
                    " characters; take a random one, such as that of `openssl rand -hex 32`");
    return secret;
}

std::string prove(const Secret& secret, std::string_view message) {
    // HMAC() and EVP_sha256() are the same in OpenSSL 1.1 and 3.
    using Sha256 = const void*();
    using Hmac =
        unsigned char*(const void* hash, const void* key, int key_bytes, const unsigned char* text,
                       size_t text_bytes, unsigned char* out, unsigned int* out_bytes);
    static void* const library = [] {
        for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"})
            if (void* handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
        return static_cast<void*>(nullptr);
    }();
    auto* const sha256 =
        library ? reinterpret_cast<Sha256*>(::dlsym(library, "EVP_sha256")) : nullptr;
    auto* const hmac = library ? reinterpret_cast<Hmac*>(::dlsym(library, "HMAC")) : nullptr;
    if (!sha256 || !hmac)
        throw Error(
            "ranks that start without MPI need OpenSSL's libcrypto, which cannot be loaded; "
            "install "
            "it (libssl3), or start the ranks with mpirun");
    std::string proof(32, '\0');
    unsigned int bytes = 0;
    if (!hmac(sha256(), secret.text.data(), static_cast<int>(secret.text.size()),
              reinterpret_cast<const unsigned char*>(message.data()), message.size(),
              reinterpret_cast<unsigned char*>(proof.data()), &bytes) ||
        bytes != proof.size())
        throw Error("OpenSSL's libcrypto computes no HMAC-SHA-256");
    return proof;
}

}  // namespace train_gpt
