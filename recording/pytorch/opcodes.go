package pytorch

// Opcodes of Python's pickle (Lib/pickletools.py).
const (
	opMark            = '('
	opStop            = '.'
	opBinfloat        = 'G'
	opBinint          = 'J'
	opBinint1         = 'K'
	opBinint2         = 'M'
	opNone            = 'N'
	opBinstring       = 'T'
	opShortBinstring  = 'U'
	opBinunicode      = 'X'
	opAppend          = 'a'
	opEmptyDict       = '}'
	opAppends         = 'e'
	opBinget          = 'h'
	opLongBinget      = 'j'
	opEmptyList       = ']'
	opBinput          = 'q'
	opLongBinput      = 'r'
	opSetitem         = 's'
	opTuple           = 't'
	opEmptyTuple      = ')'
	opSetitems        = 'u'
	opBinbytes        = 'B'
	opShortBinbytes   = 'C'
	opProto           = 0x80
	opTuple1          = 0x85
	opTuple2          = 0x86
	opTuple3          = 0x87
	opNewtrue         = 0x88
	opNewfalse        = 0x89
	opLong1           = 0x8a
	opLong4           = 0x8b
	opShortBinunicode = 0x8c
	opBinunicode8     = 0x8d
	opBinbytes8       = 0x8e
	opMemoize         = 0x94
	opFrame           = 0x95
	opBytearray8      = 0x96
)

// operands is how many bytes of number follow an opcode: an integer, the index of a memo, a length.
var operands = [256]uint8{
	opBinget: 1, opBinput: 1, opBinint1: 1, opLong1: 1, opShortBinunicode: 1, opShortBinstring: 1, opShortBinbytes: 1, opProto: 1,
	opBinint2:    2,
	opLongBinget: 4, opLongBinput: 4, opBinint: 4, opLong4: 4, opBinunicode: 4, opBinstring: 4, opBinbytes: 4,
	opBinunicode8: 8, opBinbytes8: 8, opBytearray8: 8, opBinfloat: 8, opFrame: 8,
}

var opNames = [256]string{
	opMark: "MARK", opStop: "STOP", opBinfloat: "BINFLOAT", opBinint: "BININT", opBinint1: "BININT1",
	opBinint2: "BININT2", opNone: "NONE", opBinstring: "BINSTRING", opShortBinstring: "SHORT_BINSTRING",
	opBinunicode: "BINUNICODE", opAppend: "APPEND", opEmptyDict: "EMPTY_DICT", opAppends: "APPENDS",
	opBinget: "BINGET", opLongBinget: "LONG_BINGET", opEmptyList: "EMPTY_LIST", opBinput: "BINPUT",
	opLongBinput: "LONG_BINPUT", opSetitem: "SETITEM", opTuple: "TUPLE", opEmptyTuple: "EMPTY_TUPLE",
	opSetitems: "SETITEMS", opBinbytes: "BINBYTES", opShortBinbytes: "SHORT_BINBYTES", opProto: "PROTO",
	opTuple1: "TUPLE1", opTuple2: "TUPLE2", opTuple3: "TUPLE3", opNewtrue: "NEWTRUE", opNewfalse: "NEWFALSE",
	opLong1: "LONG1", opLong4: "LONG4", opShortBinunicode: "SHORT_BINUNICODE", opBinunicode8: "BINUNICODE8",
	opBinbytes8: "BINBYTES8", opMemoize: "MEMOIZE", opFrame: "FRAME", opBytearray8: "BYTEARRAY8",
	// Known, never wanted.
	'0': "POP", '1': "POP_MARK", '2': "DUP", 'F': "FLOAT", 'I': "INT", 'L': "LONG", 'S': "STRING", 'V': "UNICODE",
	'd': "DICT", 'l': "LIST", 'g': "GET", 'p': "PUT", 0x8f: "EMPTY_SET", 0x90: "ADDITEMS", 0x91: "FROZENSET",
	'P': "PERSID", 'Q': "BINPERSID", 'R': "REDUCE", 'b': "BUILD", 'c': "GLOBAL", 'i': "INST", 'o': "OBJ",
	0x81: "NEWOBJ", 0x92: "NEWOBJ_EX", 0x93: "STACK_GLOBAL", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4",
	0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER",
}

// refused are the opcodes by which a pickle can run code or reach outside of itself, and how.
var refused = [256]string{
	'c': "names a Python class or function", 0x93: "names a Python class or function",
	'R': "calls a function", 'b': "calls a method", 'i': "makes an object", 'o': "makes an object",
	0x81: "makes an object", 0x92: "makes an object", 'P': "refers to an object outside of the file",
	'Q': "refers to an object outside of the file", 0x82: "names a registered class", 0x83: "names a registered class",
	0x84: "names a registered class", 0x97: "refers to a buffer outside of the file",
	0x98: "refers to a buffer outside of the file",
}
