"""HTTP: the application, its routes and raw prediction paths, bodies, options, keys and rates."""
