"""What is said to etcd: etcd.proto, our own writing of the part of its v3 API that is used, and what is made from it
(make proto)."""
