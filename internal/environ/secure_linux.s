// The compiler accepts a function without a body, auxv, only in a package with an assembly file.
