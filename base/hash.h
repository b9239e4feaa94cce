// Incremental XXH3.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace train_gpt {

class Hash {
  public:
    Hash();
    ~Hash();
    Hash(Hash&&) noexcept;
    Hash& operator=(Hash&&) noexcept;

    void add(std::span<const std::byte> bytes);
    /// The hash of all bytes so far, as hash_text() (base/file.h) gives it: 16 hex digits.
    std::string digest() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace train_gpt
