//! The gateway's certificate as Kubernetes mounts it: files are links into `..data`, which is a
//! link to a folder that is replaced as a whole.

use std::os::unix::fs::symlink;
use std::path::Path;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::{GATEWAY, Identities};

/// Turns the gateway's folder into a mount, with its certificate as version `..0`.
pub fn mount(folder: &Path) {
    std::fs::create_dir(folder.join("..0")).expect("a folder");
    symlink("..0", folder.join("..data")).expect("a link");
    for file in ["gateway.crt", "gateway.key"] {
        let plain = folder.join(file);
        std::fs::rename(&plain, folder.join("..0").join(file)).expect("a rename");
        symlink(format!("..data/{file}"), plain).expect("a link");
    }
}

/// Writes a new certificate of the gateway into a new folder. Returns its leaf.
pub fn write(folder: &Path, identities: &Identities) -> CertificateDer<'static> {
    std::fs::create_dir(folder).expect("a folder");
    let leaf = identities.leaf(GATEWAY);
    std::fs::write(folder.join("gateway.crt"), &leaf.chain_pem).expect("a certificate");
    std::fs::write(folder.join("gateway.key"), &leaf.key_pem).expect("a key");
    CertificateDer::from_pem_slice(leaf.chain_pem.as_bytes()).expect("a leaf")
}

/// Swaps in a new certificate as `version`. Returns its leaf.
pub fn swap(folder: &Path, version: &str, identities: &Identities) -> CertificateDer<'static> {
    let leaf = write(&folder.join(version), identities);
    symlink(version, folder.join("..tmp")).expect("a link");
    std::fs::rename(folder.join("..tmp"), folder.join("..data")).expect("a swap");
    leaf
}
