module example.com/squares

go 1.26.0

require github.com/cistern-gpu/cistern v0.0.0

replace github.com/cistern-gpu/cistern => ../..
