// What: the code of {fmt}, compiled once.
// Why: header-only, each file that formats compiles it again: half of a sanitizer build's time.
// Never: built where FMT_HEADER_ONLY is set (cmake/library.cmake: a {fmt} newer than it knows).
#ifndef FMT_HEADER_ONLY
#include <fmt/format-inl.h>

// What format.h declares as compiled elsewhere, for char.
FMT_BEGIN_NAMESPACE
namespace detail {
template FMT_API auto thousands_sep_impl(locale_ref) -> thousands_sep_result<char>;
template FMT_API auto decimal_point_impl(locale_ref) -> char;
template FMT_API auto dragonbox::to_decimal(float) noexcept -> dragonbox::decimal_fp<float>;
template FMT_API auto dragonbox::to_decimal(double) noexcept -> dragonbox::decimal_fp<double>;
template FMT_API void buffer<char>::append(const char*, const char*);
template FMT_API void vformat_to(buffer<char>&, string_view, format_args, locale_ref);
}  // namespace detail
FMT_END_NAMESPACE
#endif
