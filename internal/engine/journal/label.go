package journal

import "github.com/cistern-gpu/cistern/memory"

const libraryShift = 16

// Label is what a block keeps of its request (heap.Block.Tag): the tag and the library in one number. TagOf and LibraryOf are
// its parts.
func Label(tag uint32, library uint8) uint32 { return uint32(library)<<libraryShift | tag }
func TagOf(label uint32) uint32              { return label & memory.MaxTag }
func LibraryOf(label uint32) uint8           { return uint8(label >> libraryShift) }
