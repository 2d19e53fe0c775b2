"""Pure data types, errors, configuration, time, environment variables: what every other room stands on."""
