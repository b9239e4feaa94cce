// Unicode's normalisation form C.
#pragma once
#include <string>
#include <string_view>

namespace train_gpt {

/// The text in normalisation form C, by utf8proc (whose version of Unicode decides what newly added
/// characters become): `text` itself if it is ASCII, else a view of `storage`. Bytes that are not
/// UTF-8 stay, and nothing is composed across them.
std::string_view nfc(std::string_view text, std::string& storage);

}  // namespace train_gpt
