"""Numbers: free parameters, Hadamard transforms, standard normals, and proof that a device computes right."""
