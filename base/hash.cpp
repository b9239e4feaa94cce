#include "base/hash.h"

#include <algorithm>
#include <cstdio>

#include <xxhash.h>

#include "base/file.h"
#include "base/mapped_pages.h"

namespace train_gpt {

namespace {

std::string hex_of(XXH64_hash_t hash) {
    char hex[17];
    std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(hash));
    return hex;
}

struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

}  // namespace

struct Hash::State {
    std::unique_ptr<XXH3_state_t, Free> of{XXH3_createState()};
};

Hash::Hash() : state_(std::make_unique<State>()) { XXH3_64bits_reset(state_->of.get()); }
Hash::~Hash() = default;
Hash::Hash(Hash&&) noexcept = default;
Hash& Hash::operator=(Hash&&) noexcept = default;

void Hash::add(std::span<const std::byte> bytes) {
    XXH3_64bits_update(state_->of.get(), bytes.data(), bytes.size());
}

std::string Hash::digest() const { return hex_of(XXH3_64bits_digest(state_->of.get())); }

std::string hash_text(std::string_view bytes) {
    return hex_of(XXH3_64bits(bytes.data(), bytes.size()));
}

std::string hash_file(const std::filesystem::path& path, const Pulse& pulse) {
    const MappedFile file(path);
    Hash hash;
    for (std::span<const std::byte> rest = file.bytes(); !rest.empty();) {
        const auto piece = rest.first(std::min(most_mapped_bytes, rest.size()));
        hash.add(piece);
        release_pages(piece);
        rest = rest.subspan(piece.size());
        if (pulse) pulse();
    }
    return hash.digest();
}

}  // namespace train_gpt
