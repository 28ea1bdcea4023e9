//! Messages of the control plane: generated from `src/grpc/proto`, and compatible with the encoding
//! of another implementation.

#[cfg(test)]
mod generated;
#[cfg(test)]
mod oracle;
