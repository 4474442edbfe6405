"""The V1 API's messages: gubernator.proto is ours to edit, all else here is made from it by `make proto`."""
