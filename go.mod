module github.com/cistern-gpu/cistern

go 1.26
