"""What travels with one message besides its bytes: the peer, the devices, and resources that it uses."""
