//! The messages of the control plane: generated from what stands in `src/grpc/proto`, and encoded
//! as other people's messages are.

#[cfg(test)]
mod generated;
#[cfg(test)]
mod oracle;
