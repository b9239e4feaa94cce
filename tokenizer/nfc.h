// Unicode's normalisation form C.
#pragma once
#include <string>
#include <string_view>

namespace train_gpt {

/// The text in normalisation form C: `text` itself if there is nothing to do, else a view of
/// `storage`. utf8proc composes, but only characters that Hugging Face's tokenizers compose, which
/// know Unicode 9.0: newer ones stay as they are, whatever utf8proc knows. Bytes that are not UTF-8
/// stay, and nothing is composed across them.
std::string_view nfc(std::string_view text, std::string& storage);

}  // namespace train_gpt
