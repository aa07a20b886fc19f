# tqkv::tqkv_static: the implementation as a library, for projects without a file of their own for it. It is compiled where it is
# used, by the project's compiler; its options come after those of the project.
get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
if("C" IN_LIST languages AND NOT TARGET tqkv_static)
  set(tqkv_source "${CMAKE_CURRENT_BINARY_DIR}/tqkv_static.c")
  if(NOT EXISTS "${tqkv_source}")
    file(WRITE "${tqkv_source}" "#define TQKV_IMPLEMENTATION\n#include \"tqkv.h\"\n")
  endif()
  add_library(tqkv_static STATIC EXCLUDE_FROM_ALL "${tqkv_source}")
  add_library(tqkv::tqkv_static ALIAS tqkv_static)
  target_link_libraries(tqkv_static PUBLIC tqkv::tqkv)
  target_compile_options(tqkv_static PRIVATE -O2 -fno-fast-math)
  set_target_properties(tqkv_static PROPERTIES C_STANDARD 99 POSITION_INDEPENDENT_CODE ON)
endif()
