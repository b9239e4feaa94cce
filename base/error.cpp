#include "base/error.h"

#include <filesystem>
#include <new>

namespace train_gpt {

std::string message_of(const std::exception& error) {
    if (dynamic_cast<const std::bad_alloc*>(&error))
        return "out of memory; use a smaller model or batch, or close other programs";
    if (const auto* of = dynamic_cast<const std::filesystem::filesystem_error*>(&error))
        return Error("cannot use ", of->path1().string(), ": ", of->code().message(),
                     "; check the path and its permissions")
            .what();
    return printable(error.what());
}

}  // namespace train_gpt
